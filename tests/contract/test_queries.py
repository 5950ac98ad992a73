"""QUERY over every kind of channel: what an asker may rely on, whatever carries the bytes."""

from __future__ import annotations

import asyncio
import hmac
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from kvmesh.core.clock import ManualClock, SystemClock
from kvmesh.core.details import ANSWER, ASK
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, Refusal, RefusalReason
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer import meters
from kvmesh.transfer.asker import SHUN_S, Asker
from kvmesh.transfer.attend import ATTEND, ITEM_BYTES, AttendArguments, ClaimKind, decode_attend
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.frames import QueryFrame
from kvmesh.transfer.greeting import (
    PeerKey,
)
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.meters import LinkKey
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.query_line import Question
from kvmesh.transfer.query_ops import QueryGrant
from kvmesh.transfer.remote_attention import PartialAnswer
from kvmesh.transfer.remote_blocks import RemoteBlocks, _are_finite
from tests.contract.test_channels import CHANNELS, certificate, options_of
from tests.faulty_link import Faults, faulty_link
from tests.transfer_pair import LAYOUT, RECEIVER, SENDER, STALL_S, RecordingTarget, until

__all__ = ["certificate"]

KINDS = [name for name in CHANNELS if name.startswith(("shm", "tcp")) and name != "tcp_with_budget"]
HEADS, DIM = 2 * LAYOUT.num_kv_heads, LAYOUT.head_dim
ROW = HEADS * DIM * 4


@dataclass
class Echo:
    """Answers with the queries backwards, and sums that name the layer; remembers all."""

    ops: frozenset[int] = frozenset({ATTEND})
    refuse: Refusal | None = None
    begun: list[QueryGrant] = field(default_factory=list)
    ended: list[QueryGrant] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    on_begin: Callable[[], None] = lambda: None
    may_compute: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_compute.set()

    def begin(self, query: QueryFrame) -> QueryGrant | Refusal:
        arguments = decode_attend(query.arguments, query.operand_bytes, LAYOUT)
        if isinstance(arguments, Refusal):
            return arguments
        if not hmac.compare_digest(arguments.claim.capability, b"secret"):
            return Refusal(RefusalReason.STALE, "capability")
        if self.refuse is not None:
            return self.refuse
        grant = QueryGrant(query, arguments.answer_bytes, arguments)
        self.begun.append(grant)
        self.on_begin()
        return grant

    def compute(self, grant: QueryGrant, operands: memoryview) -> Sequence[memoryview] | Refusal:
        self.may_compute.wait(10)
        self.threads.add(threading.get_ident())
        sums = bytes([grant.work.layer]) * (grant.answer_bytes - operands.nbytes)
        return [memoryview(bytes(operands)[::-1]), memoryview(sums)]

    def end(self, grant: QueryGrant) -> None:
        self.ended.append(grant)


@dataclass
class Asking:
    """An asker, a holder, and the blocks between them."""

    echo: Echo
    server: DataServer
    asker: Asker
    holder: Holder

    def attend(self, rows: int = 3, layer: int = 1, holder: Holder | None = None) -> PartialAnswer:
        """Asks and waits, in the caller's thread."""
        blocks = RemoteBlocks(self.asker, holder or self.holder, range(2, 7))
        queries = memoryview(content(rows, layer))
        return blocks.ask(layer, queries, (rows, HEADS, DIM), 0.5).wait()


def content(rows: int, layer: int) -> bytes:
    # Backwards as well, none of these bytes is that of a NaN.
    return (bytes(range(125)) * (rows * ROW // 125 + 1))[layer : layer + rows * ROW]


def expect(answer: PartialAnswer, rows: int, layer: int) -> None:
    assert bytes(answer.output) == content(rows, layer)[::-1]
    assert bytes(answer.lse) == bytes([layer]) * (rows * HEADS * 4)


async def running(
    send: SendOptions, receive: ReceiveOptions, egress: Pacer | None = None
) -> AsyncIterator[Asking]:
    echo = Echo()
    server = DataServer(RECEIVER, RecordingTarget(), receive, queries=echo, hub=LocalHub())
    address = await server.start()
    asker = Asker(SENDER, replace(send, connect_timeout_s=5), SystemClock(), egress)
    holder = Holder(
        PeerKey(RECEIVER.worker_id, RECEIVER.incarnation),
        address.endpoint,
        address.route,
        ClaimKind.LEASE,
        WriteClaim(11, RECEIVER.incarnation, 1, b"secret"),
    )
    yield Asking(echo, server, asker, holder)
    echo.may_compute.set()
    asker.close()
    await server.close()
    assert len(set(echo.ended)) == len(echo.ended)
    assert set(echo.ended) == set(echo.begun)


@pytest.mark.parametrize(("kind", "is_paced"), [("tcp", True), ("shm", False)])
async def test_questions_leave_within_the_budget_and_are_counted(kind: str, is_paced: bool) -> None:
    taken = list[int]()

    class Counted(Pacer):
        def delay(self, num_bytes: int) -> float:
            taken.append(num_bytes)
            return 0.0

    send, egress = SendOptions(kinds=(kind,)), Counted(1e6, SystemClock())
    async for asking in running(send, ReceiveOptions(kinds=(kind,)), egress):
        for layer in (0, 1):
            expect(await asyncio.to_thread(asking.attend, 3, layer), 3, layer)
        assert taken == [3 * ROW] * 2 * is_paced
        assert asking.asker.sent_bytes == 2 * 3 * ROW
        links = asking.asker.statistics().links
        asked = links[LinkKey(RECEIVER.worker_id, ASK, "sent")]
        answered = links[LinkKey(RECEIVER.worker_id, ANSWER, "received")]
        assert (asked.frames, asked.bytes) == (2, 6 * ROW)
        assert (answered.frames, answered.bytes) == (2, 6 * ROW + 2 * 3 * HEADS * 4)
        assert answered.rtt_s > 0
        assert answered.pair_s > 0


async def test_what_was_asked_is_counted_when_its_links_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meters, "MAX_LINKS", 1)
    async for asking in running(SendOptions(kinds=("tcp",)), ReceiveOptions(kinds=("tcp",))):
        for layer in (0, 1):
            await asyncio.to_thread(asking.attend, 3, layer)
        assert asking.asker.sent_bytes == 2 * 3 * ROW


async def test_a_question_that_waits_for_its_budget_ends_with_its_asker() -> None:
    is_asked = threading.Event()

    class Spent(Pacer):
        def delay(self, num_bytes: int) -> float:
            is_asked.set()
            return 1e6

    send, egress = SendOptions(kinds=("tcp",)), Spent(1e6, SystemClock())
    async for asking in running(send, ReceiveOptions(kinds=("tcp",)), egress):
        waiting = asyncio.create_task(asyncio.to_thread(asking.attend))
        await until(is_asked.is_set)
        await asyncio.to_thread(asking.asker.close)
        with pytest.raises(LostError, match="closed by this side"):
            await waiting


@pytest.fixture(params=KINDS)
async def asking(request: pytest.FixtureRequest) -> AsyncIterator[Asking]:
    send, receive = options_of(request.param, request)
    async for asking in running(send, receive):
        yield asking


@pytest.fixture
async def over_tcp() -> AsyncIterator[Asking]:
    send = SendOptions(kinds=("tcp",), stall_timeout_s=5)
    async for asking in running(send, ReceiveOptions(stall_timeout_s=5)):
        yield asking


@pytest.fixture
async def impatient() -> AsyncIterator[Asking]:
    """Over TCP, by an asker that is soon tired of waiting."""
    send = SendOptions(kinds=("tcp",), stall_timeout_s=STALL_S)
    async for asking in running(send, ReceiveOptions(stall_timeout_s=5)):
        yield asking


async def test_answers_are_those_of_the_questions(asking: Asking) -> None:
    for rows, layer in ((1, 0), (3, 1), (1000, 2)):  # the last one is 2 MB
        expect(await asyncio.to_thread(asking.attend, rows, layer), rows, layer)
    assert threading.get_ident() not in asking.echo.threads, "the event loop stays free"
    assert asking.asker.asked == 3


async def test_questions_may_be_ahead_of_their_answers(asking: Asking) -> None:
    def ask_all() -> list[PartialAnswer]:
        blocks = RemoteBlocks(asking.asker, asking.holder, range(2))
        # Some fit in a row, and with some an answer has to be taken before the next goes out.
        pending = [
            blocks.ask(layer, memoryview(content(rows, layer)), (rows, HEADS, DIM), 1.0)
            for layer, rows in enumerate((5, 5, 300, 300))
        ]
        return [each.wait() for each in pending]

    answers = await asyncio.to_thread(ask_all)
    for layer, (rows, answer) in enumerate(zip((5, 5, 300, 300), answers, strict=True)):
        expect(answer, rows, layer)


async def test_a_refusal_is_the_holders_and_the_next_question_goes_on(asking: Asking) -> None:
    refusal = Refusal(RefusalReason.STALE, "the lease ended", work_done=True, retry_after_ms=70)
    asking.echo.refuse = refusal
    with pytest.raises(RefusedError) as caught:
        await asyncio.to_thread(asking.attend)
    assert caught.value.refusal == refusal

    asking.echo.refuse = None
    expect(await asyncio.to_thread(asking.attend), 3, 1)
    assert asking.asker.lost == 1


async def test_questions_without_right_are_refused(asking: Asking) -> None:
    claim = replace(asking.holder.claim, capability=b"guess")
    with pytest.raises(RefusedError, match="capability"):
        await asyncio.to_thread(asking.attend, 3, 1, replace(asking.holder, claim=claim))
    assert asking.echo.begun == []


async def test_another_life_of_the_holder_is_not_asked(asking: Asking) -> None:
    peer = PeerKey(RECEIVER.worker_id, RECEIVER.incarnation + 1)
    with pytest.raises((RefusedError, LostError)):
        await asyncio.to_thread(asking.attend, 3, 1, replace(asking.holder, peer=peer))
    assert asking.echo.begun == []


ARGUMENTS = AttendArguments(
    kind=ClaimKind.LEASE,
    claim=WriteClaim(11, RECEIVER.incarnation, 1, b"secret"),
    first=0,
    count=2,
    layer=1,
    num_queries=3,
    num_heads=HEADS,
    head_dim=DIM,
    dtype=LAYOUT.dtype,
    scale=1.0,
)


@pytest.mark.parametrize(
    ("arguments", "room", "word"),
    [
        (replace(ARGUMENTS, num_queries=4).encode(), 10_000, "operand"),
        (replace(ARGUMENTS, layer=LAYOUT.num_layers).encode(), 10_000, "layer"),
        (ARGUMENTS.encode()[:-1], 10_000, "arguments"),
        (ARGUMENTS.encode(), ARGUMENTS.answer_bytes - 1, "room"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name_and_the_line_lives(
    asking: Asking, arguments: bytes, room: int, word: str
) -> None:
    into = [memoryview(bytearray(room))]
    bad = Question(ATTEND, arguments, memoryview(content(3, 0)), into)

    def ask() -> None:
        asking.asker.send(asking.holder, [bad])
        asking.asker.receive(asking.holder, [bad])

    with pytest.raises(RefusedError, match=f"^{word}:"):
        await asyncio.to_thread(ask)
    expect(await asyncio.to_thread(asking.attend), 3, 1)
    assert not any(into[0]), "a refused question writes nothing"


async def test_an_op_that_is_not_known_is_unsupported(over_tcp: Asking) -> None:
    question = Question(99, b"", memoryview(b"1234"), [memoryview(bytearray(8))])

    def ask() -> None:
        over_tcp.asker.send(over_tcp.holder, [question])
        over_tcp.asker.receive(over_tcp.holder, [question])

    with pytest.raises(RefusedError, match="unsupported: op 99"):
        await asyncio.to_thread(ask)


async def test_a_worker_that_computes_for_nobody_says_unsupported() -> None:
    server = DataServer(RECEIVER, RecordingTarget(), hub=LocalHub())
    endpoint = (await server.start()).endpoint
    asker = Asker(SENDER, SendOptions(kinds=("tcp",)), SystemClock())
    peer = PeerKey(RECEIVER.worker_id, RECEIVER.incarnation)
    asking = Asking(
        Echo(), server, asker, Holder(peer, endpoint, None, ClaimKind.LEASE, ARGUMENTS.claim)
    )
    with pytest.raises(RefusedError, match="unsupported"):
        await asyncio.to_thread(asking.attend)
    asker.close()
    await server.close()


async def test_a_holder_that_closes_is_lost_and_its_grants_end(asking: Asking) -> None:
    asking.echo.may_compute.clear()
    task = asyncio.create_task(asyncio.to_thread(asking.attend))
    await until(lambda: bool(asking.echo.begun))
    closing = asyncio.create_task(asking.server.close())
    asking.echo.may_compute.set()
    await closing

    async def ask_again() -> None:  # the answer may have gone out before the close
        await task
        await asyncio.to_thread(asking.attend)

    with pytest.raises(LostError):
        await ask_again()


async def test_an_asker_that_closes_wakes_who_waits(asking: Asking) -> None:
    asking.echo.may_compute.clear()
    task = asyncio.create_task(asyncio.to_thread(asking.attend))
    await until(lambda: bool(asking.echo.begun))
    await asyncio.to_thread(asking.asker.close)
    with pytest.raises(LostError, match="closed"):
        await task
    asking.echo.may_compute.set()
    await until(lambda: len(asking.echo.ended) == 1)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3 * ROW // 4 - 1, 3 * ROW // 4, -1])
async def test_an_answer_that_is_no_number_is_refused_and_its_holder_not_asked_again(
    over_tcp: Asking, number: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends of the output and of the sums."""

    def compute(grant: QueryGrant, operands: memoryview) -> Sequence[memoryview]:
        answer = memoryview(bytearray(grant.answer_bytes))
        answer.cast("f")[place] = number
        return [answer]

    monkeypatch.setattr(over_tcp.echo, "compute", compute)
    with pytest.raises(RefusedError, match="NaN or infinity"):
        await asyncio.to_thread(over_tcp.attend)
    assert over_tcp.asker.lost == 1
    assert not over_tcp.asker.answers(over_tcp.holder.peer)


@pytest.mark.parametrize("dtype", [*ITEM_BYTES])
def test_numbers_of_all_dtypes_are_told_from_infinity_and_nan(dtype: str) -> None:
    kind = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    most = torch.finfo(kind).max
    for numbers in ([0.0, -most, most], [-0.0, torch.finfo(kind).tiny, -1.0]):
        assert _are_finite(_bytes_of(numbers, kind), dtype)
    for bad in (math.nan, math.inf, -math.inf):
        assert not _are_finite(_bytes_of([0.0, bad, 1.0], kind), dtype)


def _bytes_of(numbers: list[float], dtype: torch.dtype) -> memoryview:
    tensor = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    return memoryview(tensor.view(torch.uint8).numpy().tobytes())


async def test_a_line_that_was_cut_is_opened_once_more(over_tcp: Asking) -> None:
    expect(await asyncio.to_thread(over_tcp.attend), 3, 1)
    # What passes towards the holder are the greeting and questions: the second question is cut.
    faults = Faults(cut_at=[4000])
    async with faulty_link(over_tcp.holder.data_endpoint, faults) as endpoint:
        holder = replace(over_tcp.holder, data_endpoint=endpoint)
        for layer in (0, 1):
            expect(await asyncio.to_thread(over_tcp.attend, 3, layer, holder), 3, layer)
        over_tcp.asker.close()
    assert faults.cut_at == []


async def test_a_holder_that_goes_silent_is_noticed_in_the_stall_time(impatient: Asking) -> None:
    faults = Faults(stall_at=250)
    async with faulty_link(impatient.holder.data_endpoint, faults) as endpoint:
        holder = replace(impatient.holder, data_endpoint=endpoint)
        with pytest.raises(LostError):
            await asyncio.to_thread(impatient.attend, 3, 1, holder)
        impatient.asker.close()


async def test_a_holder_that_does_not_answer_is_waited_for_once(impatient: Asking) -> None:
    impatient.echo.may_compute.clear()
    with pytest.raises(LostError, match="silent"):
        await asyncio.to_thread(impatient.attend)
    assert len(impatient.echo.begun) == 1, "a second line would wait as long"
    impatient.echo.may_compute.set()
    await until(lambda: len(impatient.echo.ended) == 1)


async def test_a_holder_that_was_lost_is_left_alone_for_a_while(impatient: Asking) -> None:
    impatient.asker._clock = clock = ManualClock()
    impatient.echo.may_compute.clear()
    peer = impatient.holder.peer

    def ask_of_two_sequences() -> int:
        blocks = RemoteBlocks(impatient.asker, impatient.holder, range(2))
        pending = [
            blocks.ask(0, memoryview(content(rows, 0)), (rows, HEADS, DIM), 1.0) for rows in (1, 2)
        ]
        num_lost = 0
        for each in pending:
            try:
                each.wait()
            except LostError:
                num_lost += 1
        return num_lost

    assert impatient.asker.answers(peer)
    assert await asyncio.to_thread(ask_of_two_sequences) == 2
    assert len(impatient.echo.begun) == 1, "who shares a step waits no second time"
    assert not impatient.asker.answers(peer)
    with pytest.raises(LostError, match="lost just now"):
        await asyncio.to_thread(impatient.attend)

    impatient.echo.may_compute.set()
    clock.advance(SHUN_S)
    assert impatient.asker.answers(peer)


async def test_lines_are_kept_up_to_a_bound(
    over_tcp: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.transfer.asker.MAX_LINES", 2)
    port = over_tcp.holder.data_endpoint.port
    for host in ("127.0.0.1", "127.0.1", "127.1"):  # one address, as three holders
        holder = replace(over_tcp.holder, data_endpoint=Endpoint(host, port))
        expect(await asyncio.to_thread(over_tcp.attend, 3, 1, holder), 3, 1)
    assert len(over_tcp.asker._lines) == 2


async def test_lines_to_an_earlier_life_of_the_holder_are_freed(over_tcp: Asking) -> None:
    over_tcp.echo.refuse = Refusal(RefusalReason.STALE, "told to")
    into = [[memoryview(bytearray(ARGUMENTS.answer_bytes))] for _ in range(2)]
    questions = [
        Question(ATTEND, ARGUMENTS.encode(), memoryview(content(3, 0)), each) for each in into
    ]

    def ask() -> None:
        over_tcp.asker.send(over_tcp.holder, questions)
        over_tcp.asker.receive(over_tcp.holder, questions)

    with pytest.raises(RefusedError, match="told to"):
        await asyncio.to_thread(ask)
    (line,) = over_tcp.asker._lines.values()
    assert line.num_asked == 1, "nobody waits for the second answer"

    over_tcp.echo.refuse = None
    born_again = replace(RECEIVER, incarnation=RECEIVER.incarnation + 1)
    server = DataServer(born_again, RecordingTarget(), queries=over_tcp.echo, hub=LocalHub())
    peer = PeerKey(born_again.worker_id, born_again.incarnation)
    endpoint = (await server.start()).endpoint
    holder = replace(over_tcp.holder, peer=peer, data_endpoint=endpoint)
    expect(await asyncio.to_thread(over_tcp.attend, 3, 1, holder), 3, 1)
    assert line not in over_tcp.asker._lines.values()
    assert not line.is_open
    over_tcp.asker.close()
    await server.close()


async def test_questions_of_all_askers_are_answered_one_after_the_other(over_tcp: Asking) -> None:
    over_tcp.echo.may_compute.clear()
    options = SendOptions(kinds=("tcp",), stall_timeout_s=5)
    others = [Asker(SENDER, options, SystemClock()) for _ in range(3)]
    asking = [replace(over_tcp, asker=each) for each in (over_tcp.asker, *others)]
    answers = [asyncio.create_task(asyncio.to_thread(each.attend)) for each in asking]
    await until(lambda: len(over_tcp.echo.begun) == len(asking))
    over_tcp.echo.may_compute.set()
    for answer in await asyncio.gather(*answers):
        expect(answer, 3, 1)
    assert len(over_tcp.echo.threads) == 1
    for asker in others:
        asker.close()
