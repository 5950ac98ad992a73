from __future__ import annotations

import pytest

from kvmesh.policy.egress import EgressMeter


def test_a_good_day_is_measured_against_the_configured_bandwidth() -> None:
    meter = EgressMeter(100.0)
    assert meter.observe(30, 0, 1.0) == 0.3
    assert meter.observe(300, 0, 2.0) == 1.0, "never more than all of it"
    assert meter.capacity == 100.0


def test_one_transfer_on_an_idle_way_is_no_congestion() -> None:
    meter = EgressMeter(100.0)
    assert meter.observe(0, 80, 1.0) == 0.0
    assert meter.observe(80, 0, 1.0) == 0.8


def test_a_way_that_carries_a_third_is_full_at_a_third() -> None:
    meter = EgressMeter(90.0)
    used = [meter.observe(30, 60, 1.0) for _ in range(4)]
    assert used == [pytest.approx(1 / 3), 1.0, 1.0, 1.0]
    assert meter.capacity == pytest.approx(30.0)


def test_transfers_that_arrive_in_lumps_do_not_hide_it() -> None:
    meter = EgressMeter(90.0)
    for sent in (0, 0, 60, 0, 60, 0, 60):
        meter.observe(sent, 100, 1.0)
    assert meter.capacity == pytest.approx(30.0)


def test_what_arrives_at_the_end_of_a_jam_was_on_its_way_all_the_time() -> None:
    meter = EgressMeter(90.0)
    for sent in (0, 0, 0, 0):
        meter.observe(sent, 120, 1.0)
    assert meter.observe(120, 30, 1.0) == 1.0
    assert meter.capacity == pytest.approx(30.0), "120 bytes in four cycles"


def test_when_the_backlog_is_gone_the_bandwidth_is_believed_again_step_by_step() -> None:
    meter = EgressMeter(90.0)
    for _ in range(4):
        meter.observe(30, 60, 1.0)
    # The last bytes leave, and a little traffic goes on: more than a quarter of what was found.
    assert meter.observe(60, 0, 1.0) == 1.0
    assert meter.observe(15, 0, 1.0) == pytest.approx(15 / (30 * 1.25**2))
    for _ in range(10):
        meter.observe(9, 0, 1.0)
    assert meter.capacity == 90.0
    assert meter.observe(9, 0, 1.0) == pytest.approx(0.1)


def test_a_way_that_is_cut_is_full() -> None:
    meter = EgressMeter(100.0)
    meter.observe(0, 50, 1.0)
    assert [meter.observe(0, 50, 1.0) for _ in range(2)] == [1.0, 1.0]
    assert meter.capacity == 1.0


def test_one_cycle_without_a_report_does_not_make_a_fast_way_slow() -> None:
    """What was read is told once a second, and a cycle is as long: some see none, the next two."""
    meter = EgressMeter(100.0)
    for sent, waiting in ((20, 5), (20, 5), (0, 5), (40, 5)):
        used = meter.observe(sent, waiting, 1.0)
    assert used == pytest.approx(0.4)
    assert meter.capacity == 100.0


def test_a_rate_is_of_the_length_of_the_cycle() -> None:
    meter = EgressMeter(100.0)
    assert meter.observe(30, 0, 2.0) == pytest.approx(0.15)
    assert meter.observe(30, 0, 0.5) == pytest.approx(0.6)


def test_a_new_congestion_is_measured_by_itself() -> None:
    meter = EgressMeter(100.0)
    for _ in range(4):
        meter.observe(20, 60, 1.0)
    assert meter.capacity == pytest.approx(20.0)
    for sent in (60, 60, 0, 0):
        meter.observe(sent, 0, 4.0)
    assert meter.capacity == 100.0
    for _ in range(3):
        meter.observe(50, 90, 1.0)
    assert meter.capacity == pytest.approx(50.0), "what was slow before counts no more"


def test_lumps_of_a_real_slow_link_are_seen_at_its_rate_while_it_is_slow_and_no_longer() -> None:
    """Tenths of megabytes, of a link of 24 MB/s that carries 8 in all but the last four cycles."""
    meter = EgressMeter(240.0)
    low = [(21, 177), (89, 88), (88, 42), (42, 252), (0, 252), (147, 311), (0, 311)]
    used = [meter.observe(sent, left, 1.0) for sent, left in low]
    assert used[1:] == [1.0] * 6, "what left was just what waited: in a jam that is no relief"
    assert meter.capacity == pytest.approx((42 + 147) / 4)
    whole = [(334, 0), (126, 64), (189, 63), (244, 126)]
    used = [meter.observe(sent, left, 1.0) for sent, left in whole]
    assert used[1:] == [pytest.approx(0.8), pytest.approx(0.8), 1.0]
    assert meter.capacity == 240.0


def test_a_way_that_carries_more_again_is_seen_within_a_jam() -> None:
    meter = EgressMeter(90.0)
    for sent, waiting in ((0, 600), *[(30, 600)] * 6, *[(80, 600)] * 4):
        meter.observe(sent, waiting, 1.0)
    assert meter.capacity == pytest.approx(80.0), "of its last cycles, not of all"


def test_what_left_and_leaves_nothing_behind_does_not_fill_a_way_that_was_slow() -> None:
    meter = EgressMeter(100.0)
    for _ in range(4):
        meter.observe(20, 60, 1.0)
    meter.observe(60, 0, 1.0)
    used = [meter.observe(sent, 0, 1.0) for sent in (45, 60, 75)]
    assert used == [pytest.approx(0.8)] * 3


def test_a_low_way_that_is_never_left_alone_is_full_though_all_that_waits_leaves_in_a_cycle() -> (
    None
):
    meter = EgressMeter(300.0)
    used = [meter.observe(95, 50, 1.0, 0.95) for _ in range(7)]
    assert used[:3] == [pytest.approx(95 / 300)] * 3, "one long transfer is no congestion"
    assert used[3:] == [1.0] * 4
    assert meter.capacity == 300.0, "all that waited left"


@pytest.mark.parametrize(("waiting", "sending"), [(50, 0.85), (20, 1.0)])
def test_a_way_that_is_left_alone_now_and_then_or_quick_is_not_full(
    waiting: int, sending: float
) -> None:
    meter = EgressMeter(300.0)
    used = [meter.observe(95, waiting, 1.0, sending) for _ in range(8)]
    assert used == [pytest.approx(95 / 300)] * 8


def test_what_was_never_left_alone_and_is_now_has_room_at_once() -> None:
    meter = EgressMeter(300.0)
    for _ in range(8):
        meter.observe(95, 50, 1.0, 0.95)
    assert meter.observe(95, 10, 1.0, 0.3) < 1.0
    used = [meter.observe(95, 10, 1.0, 0.3) for _ in range(3)]
    assert used == sorted(used, reverse=True)
    assert used[-1] < 0.7
