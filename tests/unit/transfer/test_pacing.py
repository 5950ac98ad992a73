"""Budgets of a link."""

import asyncio
import random

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.transfer.pacing import (
    LEAST_SHARE,
    CreditWindow,
    Pacer,
    Share,
    Ticket,
    TokenBucket,
    TurnQueue,
)


def test_a_burst_is_free_and_then_the_rate_holds() -> None:
    bucket = TokenBucket(bytes_per_s=100.0, burst_bytes=50)

    assert bucket.take(50, now=10.0) == 0.0
    assert bucket.take(100, now=10.0) == pytest.approx(1.0)
    assert bucket.take(100, now=10.5) == pytest.approx(1.5)
    assert bucket.take(50, now=20.0) == 0.0


def test_no_pattern_of_calls_beats_the_rate() -> None:
    rng = random.Random(5)
    bucket, clock, sent = TokenBucket(1000.0, 100), ManualClock(), 0
    for _ in range(500):
        num_bytes = rng.randrange(1, 200)
        clock.advance(bucket.take(num_bytes, clock.now()) + rng.choice([0.0, 0.01]))
        sent += num_bytes
        assert sent <= 1000.0 * clock.now() + 100 + 1e-6


def test_a_pacer_takes_small_pieces_of_a_slow_link() -> None:
    assert Pacer(1e5, ManualClock()).piece_bytes == 16 << 10
    assert Pacer(1e12, ManualClock()).piece_bytes == 4 << 20
    many = Pacer(100e6, ManualClock())
    assert many.piece(Share.HANDOFF) == 4 * many.piece(Share.READ) == 4 * many.piece(Share.COPY)
    assert Pacer(1e5, ManualClock()).piece(Share.COPY) == 16 << 10
    pacer = Pacer(1e6, ManualClock())
    assert pacer.delay(pacer.piece_bytes) == 0.0
    assert pacer.delay(500_000) == pytest.approx(0.5)


def test_to_look_at_a_bucket_takes_nothing_from_it() -> None:
    bucket = TokenBucket(bytes_per_s=100.0, burst_bytes=50)
    assert bucket.delay(100, now=10.0) == bucket.delay(100, now=10.0) == pytest.approx(0.5)
    assert bucket.take(100, now=10.0) == pytest.approx(0.5)


def bytes_of_turns(senders: dict[str, tuple[Share, int]], num_turns: int) -> dict[str, int]:
    """What senders got that always have a next piece, the first one last in the queue."""
    queue, got = TurnQueue(), dict.fromkeys(senders, 0)

    def join(name: str) -> None:
        share, size = senders[name]

        def go() -> None:
            got[name] += size
            join(name)

        queue.join(Ticket(size, share, go))

    for name in reversed(senders):
        join(name)
    for _ in range(num_turns):
        queue.go().go()
    return got


def test_a_handoff_goes_before_reads_and_they_before_copies_and_none_is_starved() -> None:
    reads = {f"r{number}": (Share.READ, 700) for number in range(32)}
    copies = {f"c{number}": (Share.COPY, 900) for number in range(4)}
    got = bytes_of_turns({"h": (Share.HANDOFF, 1000), **reads, **copies}, 4000)

    total = sum(got.values())
    read, copied = (sum(got[name] for name in names) for names in (reads, copies))
    # A handoff beside 32 reads had a thirty-third of the budget when all stood in one line.
    assert got["h"] > 0.8 * total
    assert read == pytest.approx(LEAST_SHARE * got["h"], rel=0.01)
    assert copied == pytest.approx(LEAST_SHARE * (got["h"] + read), rel=0.01)
    assert min(got.values()) > 0


def test_within_a_share_all_get_as_much() -> None:
    got = bytes_of_turns(dict.fromkeys("abc", (Share.READ, 100)), 300)
    assert set(got.values()) == {100 * 100}


def test_a_share_that_nobody_waits_in_is_owed_nothing() -> None:
    queue, went = TurnQueue(), list[str]()

    def ticket(name: str, share: Share, num_bytes: int = 100) -> Ticket:
        each = Ticket(num_bytes, share, lambda: went.append(name))
        queue.join(each)
        return each

    read = ticket("early read", Share.READ, 1000)
    for _ in range(99):
        ticket("handoff", Share.HANDOFF)
        queue.go().go()
    queue.leave(read)
    queue.leave(read)
    ticket("read", Share.READ, 1000)
    ticket("last", Share.HANDOFF)
    while queue.first() is not None:
        queue.go().go()
    assert went[-2:] == ["last", "read"]


async def test_who_waits_for_a_budget_goes_when_it_is_there_and_who_left_does_not() -> None:
    clock, went = ManualClock(), list[str]()
    pacer = Pacer(1e6, clock)
    whole, done = pacer.piece_bytes, asyncio.Event()

    pacer.ask(whole, Share.COPY, lambda: went.append("burst"))
    assert went == ["burst"]
    pacer.ask(whole // 8, Share.COPY, done.set)
    pacer.ask(whole // 8, Share.READ, lambda: went.append("read"))
    gone = pacer.ask(whole // 8, Share.HANDOFF, lambda: went.append("gone"))
    pacer.ask(whole // 8, Share.HANDOFF, lambda: went.append("handoff"))
    assert pacer.delay(whole // 8) > 0  # a question's thread goes before them all
    pacer.withdraw(gone)
    assert not pacer.is_idle
    clock.advance(0.1)
    await done.wait()
    assert went == ["burst", "handoff", "read"]
    assert pacer.is_idle


async def test_time_in_which_nobody_waits_for_a_budget_is_counted() -> None:
    clock = ManualClock()
    pacer = Pacer(1e6, clock)
    clock.advance(2.0)
    pacer.ask(pacer.piece_bytes, Share.HANDOFF, lambda: None)
    clock.advance(1.0)
    assert pacer.idle_s == pytest.approx(3.0), "the burst was there at once"
    pacer.ask(1 << 30, Share.HANDOFF, lambda: None)
    waiting = pacer.ask(1, Share.HANDOFF, lambda: None)
    clock.advance(5.0)
    assert pacer.idle_s == pytest.approx(3.0)
    pacer.withdraw(waiting)
    clock.advance(0.5)
    assert pacer.idle_s == pytest.approx(3.5)


async def test_more_than_a_burst_goes_on_credit() -> None:
    clock, went = ManualClock(), list[str]()
    pacer = Pacer(1e6, clock)
    whole = pacer.piece_bytes

    pacer.ask(5 * whole, Share.HANDOFF, lambda: went.append("large"))
    assert went == ["large"]
    late = pacer.ask(whole, Share.HANDOFF, lambda: went.append("late"))
    clock.advance(4.9 * whole / 1e6)
    pacer.withdraw(pacer.ask(1, Share.COPY, lambda: went.append("copy")))
    assert went == ["large"]
    clock.advance(0.2 * whole / 1e6)
    pacer.withdraw(pacer.ask(1, Share.COPY, lambda: went.append("copy")))
    assert went == ["large", "late"]
    pacer.withdraw(late)


def test_a_window_bounds_what_is_unanswered_but_lets_one_piece_through() -> None:
    window = CreditWindow(100)
    assert window.has_room(1000)
    window.spend(60)
    assert window.has_room(40)
    assert not window.has_room(41)
    window.give_back(60)
    assert window.has_room(1000)
    with pytest.raises(AssertionError):
        window.give_back(1)


def test_a_window_of_zero_is_no_bound() -> None:
    window = CreditWindow(0)
    window.spend(1 << 40)
    assert window.has_room(1)
