from __future__ import annotations

from kvmesh.core.types import WorkerId
from kvmesh.policy.congestion import SEGMENT_BYTES, CongestionMeter, LinkCounts, LinkName

A = LinkName(WorkerId("a"), 1, WorkerId("home"))
B = LinkName(WorkerId("b"), 1, WorkerId("home"))
STEP = 1000 * SEGMENT_BYTES


def test_nothing_is_told_of_a_cycle_without_bytes() -> None:
    meter = CongestionMeter()
    assert meter.observe([(A, LinkCounts(STEP, 0, 0.001))]) is None, "the first counters of a link"
    assert meter.observe([(A, LinkCounts(STEP, 9, 0.9))]) is None
    assert meter.observe([]) is None


def test_segments_sent_again_are_a_sign() -> None:
    meter = CongestionMeter()
    meter.observe([(A, LinkCounts(0, 0, 0.001))])
    assert meter.observe([(A, LinkCounts(STEP, 4, 0.001))]) == 0.0, "0.4 %"
    assert meter.observe([(A, LinkCounts(2 * STEP, 24, 0.001))]) == 1.0, "2 %"


def test_a_path_that_always_loses_some_shows_a_sign_when_it_loses_more() -> None:
    meter, again = CongestionMeter(), 0
    meter.observe([(A, LinkCounts(0, 0, 0.03))])
    found = []
    for cycle in range(1, 30):
        again += 10
        found.append(meter.observe([(A, LinkCounts(cycle * STEP, again, 0.03))]))
    assert found[0] == 1.0
    assert set(found[5:]) == {0.0}, "1 % is usual here"
    assert meter.observe([(A, LinkCounts(30 * STEP, again + 60, 0.03))]) == 1.0


def test_a_round_trip_that_grows_is_a_sign() -> None:
    meter = CongestionMeter()
    meter.observe([(A, LinkCounts(0, 0, 0.030))])
    assert meter.observe([(A, LinkCounts(STEP, 0, 0.055))]) == 0.0
    assert meter.observe([(A, LinkCounts(2 * STEP, 0, 0.065))]) == 1.0


def test_a_short_round_trip_may_vary() -> None:
    meter = CongestionMeter()
    meter.observe([(A, LinkCounts(0, 0, 0.0002))])
    assert meter.observe([(A, LinkCounts(STEP, 0, 0.004))]) == 0.0
    assert meter.observe([(A, LinkCounts(2 * STEP, 0, 0.006))]) == 1.0


def test_links_count_by_their_bytes() -> None:
    meter = CongestionMeter()
    meter.observe([(A, LinkCounts(0, 0, 0.001)), (B, LinkCounts(0, 0, 0.001))])
    told = [(A, LinkCounts(3 * STEP, 0, 0.001)), (B, LinkCounts(STEP, 0, 0.1))]
    assert meter.observe(told) == 0.25


def test_a_closed_connection_and_a_restarted_worker_are_no_sign() -> None:
    meter = CongestionMeter()
    meter.observe([(A, LinkCounts(0, 500, 0.001))])
    assert meter.observe([(A, LinkCounts(STEP, 0, 0.001))]) == 0.0
    again = A._replace(incarnation=2)
    assert meter.observe([(again, LinkCounts(10 * STEP, 900, 0.5))]) is None
