from typing import NamedTuple

import pytest

from kvmesh.core.types import Refusal, RefusalReason, RequestId
from kvmesh.kv.block_parts import Part
from kvmesh.kv.handoff import HandoffTable
from kvmesh.kv.handoff_types import (
    AllWritten,
    Awaited,
    BlockGrant,
    Committed,
    Outcome,
    Released,
    Taken,
    WriteClaim,
)

LIFE, LEASE_S, SECRET = 7, 10.0, b"secret"
REQUEST, ATTEMPT = RequestId("r1"), 3
BLOCKS = (4, 5, 6, 9)
NUM_CACHED = 1


class Writer(NamedTuple):
    """A prefill worker's view of one reservation."""

    table: HandoffTable
    reservation_id: int
    generation: int = ATTEMPT
    incarnation: int = LIFE
    capability: bytes = SECRET

    @property
    def claim(self) -> WriteClaim:
        return WriteClaim(self.reservation_id, self.incarnation, self.generation, self.capability)

    def begin(
        self, first: int, count: int, now: float = 1.0, part: Part | None = None
    ) -> BlockGrant | AllWritten | Refusal:
        return self.table.begin_write(self.claim, range(first, first + count), now, part)

    def grant(self, first: int, count: int, now: float = 1.0) -> BlockGrant:
        answer = self.begin(first, count, now)
        assert isinstance(answer, BlockGrant)
        return answer

    def write(self, first: int, count: int) -> Committed | None:
        return self.table.end_write(self.grant(first, count).write_id, True, now=1.0)

    def commit(self, now: float = 1.0) -> Committed | Awaited | Refusal:
        return self.table.commit(self.claim, now)


@pytest.fixture
def table() -> HandoffTable:
    return HandoffTable(LIFE, LEASE_S, block_bytes=8)


@pytest.fixture
def writer(table: HandoffTable) -> Writer:
    number = table.reserve(REQUEST, BLOCKS, NUM_CACHED, SECRET, ATTEMPT, now=0.0)
    return Writer(table, number)


def reason(answer: object) -> RefusalReason:
    assert isinstance(answer, Refusal), f"not refused: {answer}"
    return answer.reason


def test_a_handoff_from_reserve_to_take(table: HandoffTable, writer: Writer) -> None:
    first, second = writer.grant(0, 2), writer.grant(2, 1)
    assert (first.blocks, second.blocks) == ((5, 6), (9,))
    table.end_write(second.write_id, True, now=1.0)
    table.end_write(first.write_id, True, now=1.0)
    assert writer.commit() == Committed(writer.reservation_id, REQUEST, ATTEMPT, len(BLOCKS))
    assert table.take(writer.reservation_id) == Taken(REQUEST, BLOCKS, NUM_CACHED)
    assert table.is_idle
    assert table.drain_released() == []
    table.check_integrity()


def test_a_commit_that_comes_early_counts_when_the_last_block_is_written(
    table: HandoffTable, writer: Writer
) -> None:
    assert writer.write(0, 2) is None
    assert writer.commit() == Awaited(writer.reservation_id)
    assert reason(table.take(writer.reservation_id)) is RefusalReason.STALE
    committed = writer.write(2, 1)
    assert committed == Committed(writer.reservation_id, REQUEST, ATTEMPT, len(BLOCKS))
    assert writer.commit() == committed
    assert isinstance(table.take(writer.reservation_id), Taken)


def test_a_commit_waits_for_writers(table: HandoffTable, writer: Writer) -> None:
    writer.write(0, 3)
    again = writer.grant(1, 1)
    assert isinstance(writer.commit(), Awaited)
    assert table.end_write(again.write_id, False, now=1.0) is None
    assert isinstance(writer.commit(), Awaited), "a torn rewrite undoes the block"
    assert isinstance(writer.write(1, 1), Committed)


def test_an_awaited_commit_ends_with_its_reservation(table: HandoffTable, writer: Writer) -> None:
    last = writer.grant(0, 3)
    assert isinstance(writer.commit(), Awaited)
    table.cancel(writer.reservation_id)
    assert table.end_write(last.write_id, True, now=1.0) is None
    assert [each.outcome for each in table.drain_released()] == [Outcome.CANCELLED]
    assert table.is_idle


def test_an_awaited_commit_renews_the_lease_and_does_not_count_after_it(
    table: HandoffTable, writer: Writer
) -> None:
    last = writer.grant(0, 3)
    assert isinstance(writer.commit(now=5.0), Awaited)
    assert table.expire(4.0 + LEASE_S) == []
    assert table.end_write(last.write_id, True, now=5.0 + LEASE_S) is None
    assert table.expire(5.0 + LEASE_S) == [REQUEST]
    assert [each.outcome for each in table.drain_released()] == [Outcome.EXPIRED]


def test_fully_cached_prompt_commits_at_once(table: HandoffTable) -> None:
    writer = Writer(table, table.reserve(REQUEST, BLOCKS, 4, SECRET, ATTEMPT, now=0.0))
    assert reason(writer.begin(0, 1)) is RefusalReason.INVALID
    assert isinstance(writer.commit(), Committed)


def test_repeated_commit_gives_the_same_answer_and_take_succeeds_once(
    table: HandoffTable, writer: Writer
) -> None:
    writer.write(0, 3)
    answer = writer.commit(now=1.0)
    assert isinstance(answer, Committed)
    assert writer.commit(now=2.0) == answer
    table.take(writer.reservation_id)
    assert writer.commit(now=3.0) == answer
    assert reason(table.take(writer.reservation_id)) is RefusalReason.STALE
    assert reason(writer.commit(now=1.0 + LEASE_S)) is RefusalReason.STALE
    assert table.expire(1.0 + LEASE_S) == []
    assert table.is_idle


def test_nothing_is_written_again_after_a_commit(table: HandoffTable, writer: Writer) -> None:
    """A piece is sent again if its connection is lost before the answer."""
    writer.write(0, 3)
    writer.commit(now=1.0)
    there = AllWritten(writer.reservation_id)
    assert writer.begin(0, 1) == there
    table.take(writer.reservation_id)
    assert writer.begin(0, 1) == there
    assert reason(writer._replace(capability=b"other").begin(0, 1)) is RefusalReason.INVALID
    assert reason(writer.begin(0, 1, now=1.0 + LEASE_S)) is RefusalReason.STALE
    assert table.statistics().num_writes == 0


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 4), (3, 1), (2, -1)])
def test_range_outside_of_the_reservation(writer: Writer, first: int, count: int) -> None:
    assert reason(writer.begin(first, count)) is RefusalReason.INVALID


def test_credentials_are_checked(writer: Writer) -> None:
    strangers = {
        writer._replace(incarnation=LIFE - 1): RefusalReason.STALE,
        writer._replace(generation=ATTEMPT - 1): RefusalReason.STALE,
        writer._replace(generation=ATTEMPT + 1): RefusalReason.STALE,
        writer._replace(reservation_id=99): RefusalReason.STALE,
        writer._replace(capability=b"guess"): RefusalReason.INVALID,
    }
    for stranger, expected in strangers.items():
        assert reason(stranger.begin(0, 1)) is expected
        assert reason(stranger.commit()) is expected
    assert writer.table.statistics().refused_total == 2 * len(strangers)


def test_cancel_holds_blocks_until_the_last_writer_is_gone(
    table: HandoffTable, writer: Writer
) -> None:
    first, second = writer.grant(0, 1), writer.grant(1, 1)
    assert table.cancel(writer.reservation_id)
    assert not table.cancel(writer.reservation_id)
    table.end_write(first.write_id, True, now=1.0)
    assert table.drain_released() == []
    assert table.statistics().num_fenced == 1
    table.check_integrity()
    table.end_write(second.write_id, False, now=1.0)
    assert table.drain_released() == [
        Released(writer.reservation_id, REQUEST, BLOCKS, Outcome.CANCELLED)
    ]
    assert table.drain_released() == []
    assert table.is_idle


def test_fenced_reservation_refuses_everything(table: HandoffTable, writer: Writer) -> None:
    writer.grant(0, 1)
    table.cancel(writer.reservation_id)
    assert reason(writer.begin(1, 1)) is RefusalReason.STALE
    assert reason(writer.commit()) is RefusalReason.STALE
    assert reason(table.take(writer.reservation_id)) is RefusalReason.STALE
    assert not table.renew(writer.reservation_id, 1.0)
    assert table.expire(99.0) == []


def test_committed_reservation_can_be_cancelled(table: HandoffTable, writer: Writer) -> None:
    writer.write(0, 3)
    writer.commit()
    assert table.cancel(writer.reservation_id)
    assert [released.outcome for released in table.drain_released()] == [Outcome.CANCELLED]
    assert reason(writer.commit()) is RefusalReason.STALE


def test_lease_ends_without_renewal(table: HandoffTable, writer: Writer) -> None:
    assert table.expire(LEASE_S - 0.1) == []
    assert table.expire(LEASE_S) == [REQUEST]
    assert table.expire(LEASE_S) == []
    assert table.drain_released() == [
        Released(writer.reservation_id, REQUEST, BLOCKS, Outcome.EXPIRED)
    ]
    assert table.statistics().expired_total == 1


def test_renewal_and_progress_extend_the_lease(table: HandoffTable, writer: Writer) -> None:
    assert table.renew(writer.reservation_id, now=4.0)
    assert table.expire(LEASE_S + 1.0) == []
    table.end_write(writer.grant(0, 3, now=LEASE_S + 2.0).write_id, True, now=1.0)
    assert table.expire(LEASE_S + 5.0) == []
    assert isinstance(writer.commit(now=LEASE_S + 6.0), Committed)
    assert table.expire(2 * LEASE_S + 3.0) == []
    assert table.expire(2 * LEASE_S + 6.0) == [REQUEST], "a commit that nobody takes has an end too"


def test_overdue_reservation_is_refused_before_expire_runs(writer: Writer) -> None:
    assert reason(writer.begin(0, 1, now=LEASE_S)) is RefusalReason.STALE
    assert reason(writer.commit(now=LEASE_S)) is RefusalReason.STALE
    assert not writer.table.renew(writer.reservation_id, LEASE_S)
    assert writer.table.expire(LEASE_S) == [REQUEST]


def test_capability_is_not_shown(table: HandoffTable, writer: Writer) -> None:
    assert SECRET.decode() not in repr(table._entries[writer.reservation_id])


def test_integrity_check_notices_a_shared_writable_block(table: HandoffTable) -> None:
    table.reserve(REQUEST, (1, 2), 1, SECRET, ATTEMPT, now=0.0)
    table.reserve(RequestId("r2"), (1, 3), 1, SECRET, ATTEMPT, now=0.0)
    table.check_integrity()
    table.reserve(RequestId("r3"), (1, 3), 1, SECRET, ATTEMPT, now=0.0)
    with pytest.raises(AssertionError, match="one block"):
        table.check_integrity()


def begin_part(writer: Writer, first: int, count: int, offset: int, size: int) -> int:
    answer = writer.begin(first, count, part=Part(offset, size))
    assert isinstance(answer, BlockGrant)
    return answer.write_id


def test_parts_that_make_all_blocks_whole_are_a_handoff(
    table: HandoffTable, writer: Writer
) -> None:
    lower, upper = begin_part(writer, 0, 3, 0, 5), begin_part(writer, 0, 3, 5, 3)
    table.check_integrity()
    assert reason(writer.begin(1, 1, part=Part(4, 2))) is RefusalReason.BUSY
    assert reason(writer.begin(1, 1)) is RefusalReason.BUSY
    table.end_write(upper, True, now=1.0)
    assert isinstance(writer.commit(), Awaited)
    assert isinstance(table.end_write(lower, True, now=1.0), Committed)
    table.check_integrity()


def test_a_part_that_failed_leaves_its_blocks_missing(table: HandoffTable, writer: Writer) -> None:
    writer.write(0, 3)
    table.end_write(begin_part(writer, 1, 1, 2, 4), False, now=1.0)
    assert isinstance(writer.commit(), Awaited)
    assert table.end_write(begin_part(writer, 1, 1, 2, 3), True, now=1.0) is None
    assert isinstance(table.end_write(begin_part(writer, 1, 1, 5, 1), True, now=1.0), Committed)


def test_a_whole_write_forgets_parts(table: HandoffTable, writer: Writer) -> None:
    table.end_write(begin_part(writer, 0, 3, 0, 4), True, now=1.0)
    table.end_write(writer.grant(0, 3).write_id, False, now=1.0)
    table.end_write(begin_part(writer, 0, 3, 4, 4), True, now=1.0)
    assert isinstance(writer.commit(), Awaited)
    table.check_integrity()


@pytest.mark.parametrize("part", [Part(0, 9), Part(8, 1), Part(-1, 2)])
def test_a_part_outside_of_the_block_is_refused(writer: Writer, part: Part) -> None:
    assert reason(writer.begin(0, 1, part=part)) is RefusalReason.INVALID


def test_what_does_not_exist_is_neither_open_nor_cancelled(
    table: HandoffTable, writer: Writer
) -> None:
    assert not table.is_open(writer.reservation_id + 1)
    assert not table.cancel(writer.reservation_id + 1)
    assert table.is_open(writer.reservation_id)


def test_a_reservation_that_ended_under_a_write_is_not_open(
    table: HandoffTable, writer: Writer
) -> None:
    grant = writer.grant(0, 1)
    assert table.cancel(writer.reservation_id)
    assert not table.is_open(writer.reservation_id)
    assert not table.cancel(writer.reservation_id)
    table.end_write(grant.write_id, True, now=1.0)
    assert [each.blocks for each in table.drain_released()] == [BLOCKS]
    assert table.is_idle


def test_scattered_blocks_are_one_grant(table: HandoffTable, writer: Writer) -> None:
    scattered = table.begin_write(writer.claim, [2, 0], now=1.0)
    assert isinstance(scattered, BlockGrant)
    assert scattered.blocks == (9, 5)
    table.check_integrity()
    assert reason(writer.begin(0, 1)) is RefusalReason.BUSY
    assert reason(table.begin_write(writer.claim, [1, 2], now=1.0)) is RefusalReason.BUSY
    between = writer.grant(1, 1)
    table.end_write(between.write_id, True, now=1.0)
    assert isinstance(writer.commit(), Awaited)
    assert isinstance(table.end_write(scattered.write_id, True, now=1.0), Committed)
    table.check_integrity()


def test_scattered_parts_meet_only_where_they_overlap(table: HandoffTable, writer: Writer) -> None:
    lower = table.begin_write(writer.claim, [2, 0], 1.0, Part(0, 4))
    assert isinstance(lower, BlockGrant)
    assert reason(table.begin_write(writer.claim, [0], 1.0, Part(3, 2))) is RefusalReason.BUSY
    upper = table.begin_write(writer.claim, [0, 2], 1.0, Part(4, 4))
    assert isinstance(upper, BlockGrant)
    table.end_write(lower.write_id, True, now=1.0)
    table.end_write(upper.write_id, True, now=1.0)
    assert isinstance(writer.commit(), Awaited)


@pytest.mark.parametrize("indexes", [[], [0, 3], [-1, 0], [1, 1], range(0, 3, 2), range(2, 1)])
def test_indexes_outside_of_the_reservation(writer: Writer, indexes: list[int]) -> None:
    assert reason(writer.table.begin_write(writer.claim, indexes, 1.0)) is RefusalReason.INVALID
    assert writer.table.statistics().num_writes == 0
