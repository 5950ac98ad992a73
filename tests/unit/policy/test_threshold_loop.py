from __future__ import annotations

import pytest

from kvmesh.policy.offload import AdjustReason, Threshold
from kvmesh.policy.threshold_loop import ThresholdLoop, ThresholdReading

CALM = ThresholdReading(0, 0, 0, 0, 1, 2)


def loop() -> ThresholdLoop:
    return ThresholdLoop(Threshold(1000.0, 1000.0), 100.0)


def carries(sent: int, leaving: int, local: float = 0.0) -> ThresholdReading:
    return ThresholdReading(sent, leaving, 0, local, 1, 2)


def test_a_link_that_lost_bandwidth_is_found_by_what_leaves() -> None:
    made = loop()
    for _ in range(4):
        made.cycle(carries(30, 200), 1.0)
    assert made.capacity == pytest.approx(30)
    assert made.threshold.reason is AdjustReason.LINK_FULL
    assert made.threshold.tokens == pytest.approx(1000 * 1.15**3)


def test_it_says_when_it_moved() -> None:
    made = loop()
    assert not made.cycle(CALM, 1.0)
    assert made.cycle(carries(95, 0), 1.0)


def test_queues_count_per_instance() -> None:
    made = loop()
    made.cycle(ThresholdReading(0, 0, 3, 0, 2, 2), 1.0)
    assert made.threshold.tokens == 1000, "one and a half per instance is no surge"
    made.cycle(ThresholdReading(0, 0, 3, 0, 1, 2), 1.0)
    assert made.threshold.reason is AdjustReason.REMOTE_SURGE


def test_the_capacity_for_a_plan_is_the_mean_since_the_last_one() -> None:
    made = loop()
    assert made.take_capacity() == 100, "nothing else is known at the start"
    for _ in range(2):
        made.cycle(CALM, 1.0)
    for _ in range(3):
        made.cycle(carries(50, 200), 1.0)
    assert made.take_capacity() == pytest.approx((4 * 100 + 50) / 5)
    made.cycle(carries(50, 200), 1.0)
    assert made.take_capacity() == pytest.approx(50)


def test_the_way_out_has_room_when_it_was_seen_to() -> None:
    made = loop()
    assert not made.has_room
    made.cycle(CALM, 1.0)
    assert made.has_room
    made.cycle(carries(95, 0), 1.0)
    assert not made.has_room


def shares(sent: int, with_signs: float | None, sending: float = 1.0) -> ThresholdReading:
    return ThresholdReading(sent, 0, 0, 0, 1, 2, sending, with_signs)


def test_signs_of_a_full_link_count_before_kv_waits() -> None:
    made = loop()
    assert not made.cycle(shares(40, 1.0), 1.0), "one cycle may be chance"
    assert not made.cycle(shares(40, None), 1.0), "no report came in between"
    assert made.cycle(shares(40, 0.6), 1.0)
    assert made.threshold.reason is AdjustReason.LINK_FULL
    assert not made.has_room
    assert made.cycle(shares(40, 0.4), 1.0)
    assert made.has_room, "most bytes go without signs again"


def test_signs_of_a_burst_at_full_speed_do_not_count() -> None:
    made = loop()
    for _ in range(5):
        assert not made.cycle(shares(20, 1.0, sending=0.2), 1.0), "20 bytes in 0.2 s"
    assert made.has_room


def test_signs_end_with_the_traffic() -> None:
    made = loop()
    for _ in range(3):
        made.cycle(shares(40, 1.0), 1.0)
    assert not made.has_room
    made.cycle(CALM, 1.0)
    assert made.has_room
