"""The holder's table of leases: who may read, what stays, and when it is given back."""

from __future__ import annotations

import pytest

from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.kv.read_leases import MAX_RENEWALS, OpenedLease, Reader, ReadLeaseTable, ReadTicket

LIFE = 7
READER, OTHER = Reader("r0", "r0"), Reader("r1", "r1")


def make_table(max_leases: int = 4, max_blocks: int = 10) -> ReadLeaseTable:
    return ReadLeaseTable(LIFE, 2.0, max_leases=max_leases, max_blocks=max_blocks)


def opened(table: ReadLeaseTable, *blocks: int, now: float = 0.0, reader: Reader = READER) -> int:
    lease = table.open(reader, blocks, b"secret", now)
    assert isinstance(lease, OpenedLease)
    return lease.lease_id


def read(
    table: ReadLeaseTable,
    lease_id: int,
    *runs: tuple[int, int],
    now: float = 1.0,
    incarnation: int = LIFE,
    generation: int = 1,
    capability: bytes = b"secret",
) -> ReadTicket | Refusal:
    claim = WriteClaim(lease_id, incarnation, generation, capability)
    answer = table.begin_read(claim, runs, now)
    table.check_integrity()
    return answer


def granted(answer: ReadTicket | Refusal) -> ReadTicket:
    assert isinstance(answer, ReadTicket), answer
    return answer


def reason(answer: object) -> RefusalReason:
    assert isinstance(answer, Refusal), answer
    return answer.reason


def test_runs_name_blocks_of_the_lease_by_index() -> None:
    table = make_table()
    lease = opened(table, 40, 7, 8, 30)
    assert granted(read(table, lease, (2, 2), (0, 1))).blocks == (8, 30, 40)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"incarnation": LIFE - 1}, RefusalReason.STALE),
        ({"generation": 2}, RefusalReason.STALE),
        ({"now": 2.0}, RefusalReason.STALE),
        ({"capability": b"guess"}, RefusalReason.INVALID),
    ],
)
def test_a_read_without_right_is_refused(
    change: dict[str, object], expected: RefusalReason
) -> None:
    table = make_table()
    lease = opened(table, 1, 2)
    assert reason(read(table, lease, (0, 1), **change)) is expected  # type: ignore[arg-type]
    assert table.statistics().num_reads == 0
    assert table.statistics().refused_total == 1


def test_a_run_beyond_the_lease_is_refused() -> None:
    table = make_table()
    lease = opened(table, 1, 2)
    for run in ((1, 2), (2**32 - 1, 1), (-1, 1)):
        assert reason(read(table, lease, run)) is RefusalReason.INVALID


def test_blocks_that_are_named_again_and_again_are_refused() -> None:
    table = make_table()
    lease = opened(table, 1, 2)
    assert reason(read(table, lease, (0, 2), (0, 1))) is RefusalReason.INVALID
    assert table.statistics().num_reads == 0


def test_what_is_given_back_stays_while_it_is_read() -> None:
    table = make_table()
    lease = opened(table, 1, 2)
    first, second = (granted(read(table, lease, (0, 1))) for _ in range(2))
    assert table.close(lease, LIFE, b"secret", 1.0)
    assert reason(read(table, lease, (0, 1))) is RefusalReason.STALE
    assert not table.close(lease, LIFE, b"secret", 1.0)

    table.end_read(first.read_id, 1.0)
    assert table.drain_released() == []
    table.end_read(second.read_id, 1.0)
    assert table.drain_released() == [(1, 2)]
    assert table.is_idle


def test_only_who_knows_the_secret_gives_back() -> None:
    table = make_table()
    lease = opened(table, 1)
    assert not table.close(lease, LIFE, b"guess", 0.0)
    assert not table.close(lease, LIFE + 1, b"secret", 0.0)
    assert table.statistics().num_open == 1


def test_a_lease_that_nobody_reads_by_ends() -> None:
    table = make_table()
    opened(table, 1)
    assert table.expire(1.9) == 0
    assert table.expire(2.0) == 1
    assert table.drain_released() == [(1,)]
    assert table.statistics().expired_total == 1


def test_a_read_may_take_longer_than_the_lease_lasts_without_one() -> None:
    table = make_table()
    lease = opened(table, 1, 2)
    slow = granted(read(table, lease, (0, 1)))
    assert table.expire(9.0) == 0
    granted(read(table, lease, (1, 1), now=9.0))
    table.end_read(slow.read_id, 9.5)
    assert table.expire(11.5) == 0, "the other one reads on"
    assert table.expire(MAX_RENEWALS * table.lease_s) == 1
    assert table.drain_released() == []


def test_the_time_of_a_lease_begins_again_when_a_read_ends() -> None:
    table = make_table()
    lease = opened(table, 1)
    ticket = granted(read(table, lease, (0, 1)))
    table.end_read(ticket.read_id, 9.0)
    assert table.expire(10.9) == 0
    assert table.expire(11.0) == 1


def test_reads_renew_a_lease_but_not_for_ever() -> None:
    table = make_table()
    lease = opened(table, 1)
    now = 0.0
    while isinstance(ticket := read(table, lease, (0, 1), now=now), ReadTicket):
        table.end_read(ticket.read_id, now)
        assert table.expire(now) == 0
        now += 1.0
    assert now == MAX_RENEWALS * table.lease_s


@pytest.mark.parametrize(("limits", "count"), [((6, 100), 3), ((100, 8), 2)])
def test_one_reader_gets_half_of_the_leases_and_of_the_blocks(
    limits: tuple[int, int], count: int
) -> None:
    table = make_table(*limits)
    leases = [opened(table, 2 * number, 2 * number + 1) for number in range(count)]
    refused = table.open(READER, (90, 91), b"secret", 0.0)
    assert reason(refused) is RefusalReason.BUSY
    assert isinstance(refused, Refusal)
    assert READER.name in refused.message
    assert isinstance(table.open(OTHER, (90, 91), b"secret", 0.0), OpenedLease)
    table.close(leases[0], LIFE, b"secret", 0.0)
    opened(table, 92, 93)
    assert table.statistics().refused_total == 1


def is_open(table: ReadLeaseTable, reader: Reader, *blocks: int, now: float = 0.0) -> bool:
    return isinstance(table.open(reader, blocks or (0,), b"secret", now), OpenedLease)


def fill(table: ReadLeaseTable, reader: Reader, now: float = 0.0) -> list[int]:
    """Takes all that a reader gets."""
    leases = []
    while isinstance(lease := table.open(reader, (0,), b"secret", now), OpenedLease):
        leases.append(lease.lease_id)
    return leases


def test_readers_of_one_host_share_what_it_gets() -> None:
    """Many workers behind one address: one that asks without end keeps no other out."""
    table = make_table(max_leases=16, max_blocks=1000)
    greedy, modest = Reader("nat", "w0"), Reader("nat", "w1")
    leases = fill(table, greedy)
    assert len(leases) == 8, "half, while nobody else asks"
    assert not is_open(table, modest), "the host has its half"
    table.close(leases[0], LIFE, b"secret", 0.0)
    assert not is_open(table, greedy), "another one of its host waits"
    assert is_open(table, modest)
    assert is_open(table, OTHER), "another host has the other half"
    for lease_id in leases[1:]:
        table.close(lease_id, LIFE, b"secret", 0.0)
    assert len(fill(table, modest)) == 3, "one is open, half of the host's is the most: w0 waits"
    assert len(fill(table, greedy)) == 4


def test_readers_of_one_host_share_its_blocks_as_well() -> None:
    table = make_table(max_leases=100, max_blocks=16)
    greedy, modest = Reader("nat", "w0"), Reader("nat", "w1")
    lease = opened(table, *range(4), reader=greedy)
    opened(table, *range(4), reader=greedy)
    assert not is_open(table, modest, *range(2))
    table.close(lease, LIFE, b"secret", 0.0)
    assert not is_open(table, greedy)
    assert is_open(table, modest, *range(4))


def test_hosts_share_all_while_one_of_them_waits() -> None:
    table = make_table(max_leases=6, max_blocks=1000)
    hosts = [Reader(f"h{number}", "w") for number in range(3)]
    first, second = fill(table, hosts[0]), fill(table, hosts[1])
    assert (len(first), len(second)) == (3, 3)
    assert not is_open(table, hosts[2])
    table.close(first[0], LIFE, b"secret", 0.0)
    assert not is_open(table, hosts[0]), "two of six are its third"
    assert is_open(table, hosts[2])


def test_who_was_refused_is_forgotten_after_the_time_of_a_lease() -> None:
    table = make_table(max_leases=16, max_blocks=1000)
    greedy, modest = Reader("nat", "w0"), Reader("nat", "w1")
    lease = fill(table, greedy)[0]
    assert not is_open(table, modest)
    table.close(lease, LIFE, b"secret", 0.0)
    assert not is_open(table, greedy, now=1.9)
    assert is_open(table, greedy, now=2.0)


def test_invented_names_are_not_remembered_without_end() -> None:
    table = make_table(max_leases=4, max_blocks=1000)
    fill(table, READER)
    opened(table, 1, reader=OTHER)
    opened(table, 1, reader=Reader("r2", "r2"))
    for number in range(100):
        assert not is_open(table, Reader("r0", f"w{number}"))
    assert len(table._refused_at) == 4


def test_one_lease_may_be_of_more_than_half_of_the_blocks() -> None:
    table = make_table(max_blocks=10)
    opened(table, *range(9))


def test_more_leases_or_blocks_than_allowed_are_refused_until_some_end() -> None:
    table = make_table(max_leases=2, max_blocks=5)
    first = opened(table, 1, 2, 3)
    refused = table.open(OTHER, (4, 5, 6), b"secret", 0.0)
    assert reason(refused) is RefusalReason.BUSY
    assert isinstance(refused, Refusal)
    assert refused.retry_after_ms > 0
    opened(table, 4, 5, reader=OTHER)
    assert reason(table.open(OTHER, (), b"secret", 0.0)) is RefusalReason.BUSY
    table.close(first, LIFE, b"secret", 0.0)
    opened(table, 6)


def test_the_limit_of_leases_is_of_all_readers_together() -> None:
    table = make_table(max_leases=2)
    opened(table, 1)
    opened(table, 2, reader=OTHER)
    assert reason(table.open(Reader("r2", "r2"), (3,), b"secret", 0.0)) is RefusalReason.BUSY
    assert table.statistics().num_open == 2


def test_who_asks_about_a_lease_gets_its_blocks_and_renews_it() -> None:
    table = make_table()
    lease = opened(table, 4, 5)
    assert table.claimed(WriteClaim(lease, LIFE, 1, b"secret"), 1.5) == (4, 5)
    assert table.expire(3.0) == 0
    assert table.expire(3.5) == 1
    lease, now = opened(table, 6, now=4.0), 4.0
    claim = WriteClaim(lease, LIFE, 1, b"secret")
    while not isinstance(table.claimed(claim, now), Refusal):
        now += 1.0
    assert now == 4.0 + MAX_RENEWALS * table.lease_s, "not for ever"


def test_who_may_not_read_may_not_ask() -> None:
    table = make_table()
    lease = opened(table, 4)
    for life, generation, capability, expected in (
        (LIFE + 1, 1, b"secret", RefusalReason.STALE),
        (LIFE, 2, b"secret", RefusalReason.STALE),
        (LIFE, 1, b"wrong", RefusalReason.INVALID),
    ):
        answer = table.claimed(WriteClaim(lease, life, generation, capability), 1.0)
        assert isinstance(answer, Refusal)
        assert answer.reason is expected


def test_a_table_is_idle_when_the_last_block_was_taken_back() -> None:
    table = make_table()
    assert table.is_idle
    lease = opened(table, 1)
    assert not table.is_idle
    ticket = granted(read(table, lease, (0, 1)))
    table.close(lease, LIFE, b"secret", 1.0)
    assert not table.is_idle
    table.end_read(ticket.read_id, 1.0)
    assert not table.is_idle, "the references are not the caller's yet"
    assert table.drain_released() == [(1,)]
    assert table.is_idle
