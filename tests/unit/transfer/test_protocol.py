"""Both state machines: what each frame does in each state."""

import dataclasses

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import KvLayout, Refusal, RefusalReason, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer import protocol
from kvmesh.transfer.frames import (
    BlockPart,
    BlockRun,
    CancelFrame,
    Checksum,
    CommitFrame,
    CommitOkFrame,
    DataFrame,
    ErrorFrame,
    Frame,
    GetFrame,
    HelloFrame,
    HelloOkFrame,
    LinkOffer,
    LinkTerms,
    PullFrame,
    PullRun,
    PutFrame,
    PutOkFrame,
    QueryFrame,
)
from kvmesh.transfer.protocol import (
    ChannelIdentity,
    Commit,
    Copy,
    Drain,
    Forget,
    Read,
    ReceiverMachine,
    Reply,
    Write,
    refusal_of,
)
from kvmesh.transfer.sender_protocol import (
    Arriving,
    Ended,
    Late,
    Moved,
    Opened,
    Refused,
    SenderMachine,
)

LAYOUT = KvLayout("model", "bfloat16", 16, 2, 2, 8)
HELLO = HelloFrame(WorkerId("p0"), 3, WorkerId("d0"), 7, LAYOUT)
CLAIM = WriteClaim(1, 7, 0, b"secret")
STALE = Refusal(RefusalReason.STALE, "gone", retry_after_ms=5)


def _put(transfer_id: int = 1, *, last: bool = True, incarnation: int = 7) -> PutFrame:
    claim = dataclasses.replace(CLAIM, incarnation=incarnation)
    return PutFrame(transfer_id, claim, (BlockRun(0, 1),), last)


def _receiver() -> ReceiverMachine:
    machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 7, LAYOUT))
    assert machine.receive(HELLO) == Reply(HelloOkFrame(WorkerId("d0"), 7))
    return machine


def _sender() -> SenderMachine:
    machine = SenderMachine(ChannelIdentity(WorkerId("p0"), 3, LAYOUT), WorkerId("d0"), 7)
    assert machine.hello() == HELLO
    assert machine.receive(HelloOkFrame(WorkerId("d0"), 7)) == Opened()
    return machine


def _commit(transfer_id: int = 1, incarnation: int = 7) -> CommitFrame:
    return CommitFrame(transfer_id, dataclasses.replace(CLAIM, incarnation=incarnation), 42, 20, 2)


@pytest.mark.parametrize(
    "frame", [_put(), _commit(), CancelFrame(1), HelloOkFrame(WorkerId(""), 0)]
)
def test_nothing_is_heard_before_hello(frame: Frame) -> None:
    machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 7, LAYOUT))

    with pytest.raises(ProtocolError) as caught:
        machine.receive(frame)

    assert caught.value.reason == "unexpected_frame"
    assert machine.peer is None


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"peer_incarnation": 6}, "identity", "this is d0/7, not d0/6"),
        ({"peer_worker_id": WorkerId("d1")}, "identity", "this is d0/7, not d1/7"),
        (
            {"layout": dataclasses.replace(LAYOUT, block_size=32, dtype="float32")},
            "layout",
            "dtype float32 there, bfloat16 here; block_size 32 there, 16 here",
        ),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_name(
    change: dict[str, object], reason: str, message: str
) -> None:
    machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 7, LAYOUT))

    action = machine.receive(dataclasses.replace(HELLO, **change))  # type: ignore[arg-type]

    assert action == Reply(ErrorFrame(0, reason, message), close=True)
    assert machine.peer is None


def test_a_put_is_written_and_acknowledged_with_progress() -> None:
    machine = _receiver()
    first, second = _put(last=False), _put()

    assert machine.receive(first) == Write(first)
    assert machine.payload_received(first, 100, intact=True) == PutOkFrame(1, 100)
    assert machine.receive(second) == Write(second)
    assert machine.payload_received(second, 50, intact=True) == PutOkFrame(1, 150)


def test_a_refused_transfer_is_answered_once_and_drained_to_its_end() -> None:
    machine = _receiver()
    first, second = _put(last=False), _put()

    machine.receive(first)
    drain = machine.write_refused(first, STALE)
    assert drain == Drain(first, ErrorFrame(1, "stale", "gone", False, 5))
    assert machine.payload_received(first, 0, intact=True) is None
    assert machine.receive(second) == Drain(second, None)
    assert machine.payload_received(second, 0, intact=True) is None
    third = _put(2)
    assert machine.receive(third) == Write(third)


def test_a_wrong_checksum_refuses_the_transfer_only() -> None:
    machine = _receiver()
    machine.receive(_put(last=False))

    answer = machine.payload_received(_put(last=False), 100, intact=False)

    assert isinstance(answer, ErrorFrame)
    assert (answer.transfer_id, answer.reason) == (1, "checksum")
    assert machine.receive(_put()) == Drain(_put(), None)


def test_another_incarnation_never_reaches_the_target() -> None:
    machine = _receiver()

    drain = machine.receive(_put(incarnation=6))
    assert isinstance(drain, Drain)
    assert drain.reply is not None
    assert drain.reply.reason == "stale"
    machine.payload_received(_put(incarnation=6), 0, intact=True)

    reply = machine.receive(_commit(2, incarnation=8))
    assert isinstance(reply, Reply)
    assert isinstance(reply.frame, ErrorFrame)
    assert reply.frame.reason == "stale"


@pytest.mark.parametrize("transfer_id", [0, 1, 2])
def test_transfer_ids_must_rise(transfer_id: int) -> None:
    machine = _receiver()
    machine.receive(_commit(2))
    machine.commit_answered(_commit(2), None)

    with pytest.raises(ProtocolError) as caught:
        machine.receive(_put(transfer_id))

    assert caught.value.reason == "reordered_transfer"


def test_a_cancelled_transfer_is_over() -> None:
    machine = _receiver()
    machine.receive(_put(last=False))
    machine.payload_received(_put(last=False), 100, intact=True)

    assert machine.receive(CancelFrame(1)) == Forget()
    assert machine.receive(CancelFrame(99)) == Forget()
    with pytest.raises(ProtocolError, match="reordered_transfer"):
        machine.receive(_put())


def test_open_transfers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_OPEN_TRANSFERS", 2)
    machine = _receiver()
    for transfer_id in (1, 2):
        machine.receive(_put(transfer_id, last=False))

    with pytest.raises(ProtocolError, match="too_many_transfers"):
        machine.receive(_put(3))


def test_commit_is_asked_and_answered() -> None:
    machine = _receiver()

    assert machine.receive(_commit(1)) == Commit(_commit(1))
    assert machine.commit_answered(_commit(1), None) == CommitOkFrame(1)
    assert machine.receive(_commit(2)) == Commit(_commit(2))
    assert machine.commit_answered(_commit(2), STALE) == ErrorFrame(2, "stale", "gone", False, 5)


def _pulling(pool_blocks: int) -> ReceiverMachine:
    machine = ReceiverMachine(ChannelIdentity(WorkerId("d0"), 7, LAYOUT))
    offer = LinkOffer(1, 0, Checksum.NONE, pool_blocks)
    machine.receive(dataclasses.replace(HELLO, link=offer))
    return machine


def test_a_pull_is_copied_and_acknowledged_with_its_bytes() -> None:
    machine = _pulling(pool_blocks=8)
    pull = PullFrame(1, CLAIM, (PullRun(6, 0, 2), PullRun(0, 5, 1)))

    assert machine.receive(pull) == Copy(pull)
    assert machine.pull_answered(pull, None) == PutOkFrame(1, 3 * LAYOUT.block_bytes)
    assert pull.as_put().runs == (BlockRun(0, 2), BlockRun(5, 1))
    joined = PullFrame(2, CLAIM, (PullRun(6, 1, 2), PullRun(0, 3, 1), PullRun(1, 9, 1)))
    assert joined.as_put().runs == (BlockRun(1, 3), BlockRun(9, 1))


@pytest.mark.parametrize(
    ("pool_blocks", "incarnation", "reason"),
    [(7, 7, "invalid"), (0, 7, "invalid"), (8, 6, "stale")],
)
def test_a_pull_outside_of_the_mapped_pool_is_refused(
    pool_blocks: int, incarnation: int, reason: str
) -> None:
    machine = _pulling(pool_blocks)
    assert machine.has_pool == bool(pool_blocks)
    claim = dataclasses.replace(CLAIM, incarnation=incarnation)

    reply = machine.receive(PullFrame(1, claim, (PullRun(6, 0, 2),)))

    assert isinstance(reply, Reply)
    assert isinstance(reply.frame, ErrorFrame)
    assert reply.frame.reason == reason
    assert isinstance(machine.receive(PullFrame(2, CLAIM, (PullRun(0, 0, 1),))), Copy | Reply)


@pytest.mark.parametrize("refusal", [None, STALE])
def test_a_pull_that_was_answered_is_not_open_any_more(refusal: Refusal | None) -> None:
    machine = _pulling(pool_blocks=8)
    for transfer_id in range(1, protocol.MAX_OPEN_TRANSFERS + 2):
        pull = PullFrame(transfer_id, CLAIM, (PullRun(0, 0, 1),))
        assert machine.receive(pull) == Copy(pull)
        machine.pull_answered(pull, refusal)


def test_a_refused_pull_is_over() -> None:
    machine = _pulling(pool_blocks=8)
    pull = PullFrame(1, CLAIM, (PullRun(0, 0, 1),))
    machine.receive(pull)

    assert machine.pull_answered(pull, STALE) == ErrorFrame(1, "stale", "gone", False, 5)
    with pytest.raises(ProtocolError, match="reordered_transfer"):
        machine.receive(pull)


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [
        (Checksum.NONE, Checksum.NONE, Checksum.NONE),
        (Checksum.NONE, Checksum.CRC32C, Checksum.CRC32C),
        (Checksum.CRC32, Checksum.NONE, Checksum.CRC32),
        (Checksum.CRC32C, Checksum.CRC32, Checksum.CRC32),
    ],
)
def test_both_ends_learn_the_terms(ours: Checksum, theirs: Checksum, agreed: Checksum) -> None:
    offer = LinkOffer(1, 0, theirs)
    sender = SenderMachine(ChannelIdentity(WorkerId("p0"), 3, LAYOUT), WorkerId("d0"), 7, offer)
    receiver = ReceiverMachine(
        ChannelIdentity(WorkerId("d0"), 7, LAYOUT), LinkTerms(ours, window_bytes=99)
    )

    reply = receiver.receive(sender.hello())

    assert isinstance(reply, Reply)
    assert sender.receive(reply.frame) == Opened()
    assert sender.terms == receiver.terms == LinkTerms(agreed, 99)


def test_a_greeting_can_be_taken_back() -> None:
    machine = _pulling(pool_blocks=8)

    assert machine.turn_away("mapping", "no memfd") == ErrorFrame(0, "mapping", "no memfd")
    assert machine.peer is None


def test_a_get_is_read_and_answered() -> None:
    machine = _receiver()
    get = GetFrame(5, CLAIM, (BlockRun(0, 2), BlockRun(7, 1)))

    assert machine.receive(get) == Read(get)
    num_bytes = 3 * machine.block_bytes
    assert machine.answered(get, num_bytes, checksum=True) == DataFrame(5, num_bytes)

    again = dataclasses.replace(get, transfer_id=6)
    assert machine.receive(again) == Read(again)
    refusal = Refusal(RefusalReason.STALE, "gone")
    assert machine.refused(again, refusal) == ErrorFrame(6, "stale", "gone")
    with pytest.raises(ProtocolError, match="reordered_transfer"):
        machine.receive(get)


def test_a_get_of_another_life_never_reaches_the_source() -> None:
    claim = dataclasses.replace(CLAIM, incarnation=CLAIM.incarnation + 1)

    reply = _receiver().receive(GetFrame(5, claim, (BlockRun(0, 1),)))

    assert isinstance(reply, Reply)
    assert isinstance(reply.frame, ErrorFrame)
    assert (reply.frame.transfer_id, reply.frame.reason) == (5, "stale")


def test_a_reader_takes_what_it_asked_for() -> None:
    sender = _sender()
    number = sender.open_get(24)
    assert sender.receive(DataFrame(number, 24)) == Arriving(number)
    assert sender.data_received(number, intact=True) == Moved(number, complete=True)

    number = sender.open_get(24)
    assert sender.receive(DataFrame(number, 24)) == Arriving(number)
    damaged = sender.data_received(number, intact=False)
    assert isinstance(damaged, Refused)
    assert damaged.refusal.reason is RefusalReason.LOST

    number = sender.open_get(24)
    refused = sender.receive(ErrorFrame(number, "stale", "gone"))
    assert refused == Refused(number, Refusal(RefusalReason.STALE, "gone"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (DataFrame(1, 23), "bad_payload_size"),
        (DataFrame(2, 24), "unknown_transfer"),
        (PutOkFrame(1, 24), "unexpected_frame"),
        (CommitOkFrame(1), "unexpected_frame"),
    ],
)
def test_another_answer_to_a_get_ends_the_channel(answer: Frame, reason: str) -> None:
    sender = _sender()
    assert sender.open_get(24) == 1

    with pytest.raises(ProtocolError, match=reason):
        sender.receive(answer)


def test_data_that_nobody_asked_for_ends_the_channel() -> None:
    sender = _sender()
    number = sender.open_put(24)

    with pytest.raises(ProtocolError, match="unexpected_frame"):
        sender.receive(DataFrame(number, 24))


@pytest.mark.parametrize(("offset", "size"), [(0, 2**31), (1, 2**31)])
def test_a_pull_of_more_than_a_block_is_refused(offset: int, size: int) -> None:
    pull = PullFrame(5, CLAIM, (PullRun(0, 0, 1),), BlockPart(offset, size))

    reply = _pulling(pool_blocks=8).receive(pull)

    assert isinstance(reply, Reply)
    assert isinstance(reply.frame, ErrorFrame)
    assert reply.frame.reason == "invalid"


def test_a_query_is_answered_and_its_operands_are_dropped() -> None:
    query = QueryFrame(5, 9, 64, b"", 128)

    drain = _receiver().receive(query)

    assert drain == Drain(query, ErrorFrame(5, "unsupported", "op 9 is not computed here"))


@pytest.mark.parametrize("frame", [HELLO, PutOkFrame(1, 1), ErrorFrame(1, "stale", "")])
def test_a_receiver_hears_no_answers(frame: Frame) -> None:
    with pytest.raises(ProtocolError, match="unexpected_frame"):
        _receiver().receive(frame)


def test_a_sender_follows_its_transfer_to_the_end() -> None:
    machine = _sender()
    put, commit = machine.open_put(150), machine.open_commit()

    assert machine.receive(PutOkFrame(put, 100)) == Moved(put, complete=False)
    assert machine.receive(PutOkFrame(put, 150)) == Moved(put, complete=True)
    assert machine.receive(CommitOkFrame(commit)) == Moved(commit, complete=True)
    with pytest.raises(ProtocolError, match="unknown_transfer"):
        machine.receive(CommitOkFrame(commit))


def test_an_answer_to_a_transfer_that_was_given_up_is_late() -> None:
    machine = _sender()
    put = machine.open_put(10)
    machine.give_up(put)

    assert machine.receive(PutOkFrame(put, 10)) == Late(put)
    with pytest.raises(ProtocolError, match="unknown_transfer"):
        machine.receive(ErrorFrame(put, "stale", ""))


def test_a_refusal_ends_one_transfer_and_an_error_the_channel() -> None:
    machine = _sender()
    put = machine.open_put(10)

    assert machine.receive(ErrorFrame(put, "stale", "gone", False, 5)) == Refused(put, STALE)
    assert machine.receive(ErrorFrame(0, "bad_magic", "no")) == Ended(
        Refusal(RefusalReason.INVALID, "bad_magic: no")
    )


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (PutOkFrame(9, 1), "unknown_transfer"),
        (PutOkFrame(1, 11), "wrong_progress"),
        (CommitOkFrame(1), "unexpected_frame"),
        (PutOkFrame(2, 1), "unexpected_frame"),
        (HelloOkFrame(WorkerId("d0"), 7), "unexpected_frame"),
        (_put(), "unexpected_frame"),
    ],
)
def test_a_sender_names_what_a_receiver_must_not_say(frame: Frame, reason: str) -> None:
    machine = _sender()
    machine.open_put(10)
    machine.open_commit()

    with pytest.raises(ProtocolError) as caught:
        machine.receive(frame)

    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (CommitOkFrame(1), "unexpected_frame"),
        (HelloOkFrame(WorkerId("d0"), 8), "wrong_peer"),
        (HelloOkFrame(WorkerId("d1"), 7), "wrong_peer"),
    ],
)
def test_a_sender_wants_the_right_hello_ok_first(frame: Frame, reason: str) -> None:
    machine = SenderMachine(ChannelIdentity(WorkerId("p0"), 3, LAYOUT), WorkerId("d0"), 7)

    with pytest.raises(ProtocolError) as caught:
        machine.receive(frame)

    assert caught.value.reason == reason


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_refusals_cross_the_wire_whole(reason: RefusalReason) -> None:
    frame = ErrorFrame(1, reason.value, "why", work_done=True, retry_after_ms=9)

    assert refusal_of(frame) == Refusal(reason, "why", work_done=True, retry_after_ms=9)


def test_words_of_the_channel_become_refusals() -> None:
    assert refusal_of(ErrorFrame(0, "identity", "x")).reason is RefusalReason.STALE
    assert refusal_of(ErrorFrame(1, "checksum", "x")).reason is RefusalReason.LOST
    assert refusal_of(ErrorFrame(1, "new word", "x")).reason is RefusalReason.INVALID
