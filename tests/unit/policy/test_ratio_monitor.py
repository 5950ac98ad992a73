from __future__ import annotations

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.pdserve import RatioReason
from kvmesh.policy.ratio_monitor import MIN_REQUESTS, RatioMonitor


def note(monitor: RatioMonitor, prefill_s: float, total_s: float) -> None:
    """As many requests as make a window."""
    for _ in range(MIN_REQUESTS):
        monitor.note(prefill_s, total_s)


def test_the_few_requests_with_which_a_load_begins_are_no_window() -> None:
    monitor = RatioMonitor()
    monitor.note(0.3, 0.3)  # still in prefill when it ends: a share of one
    assert monitor.end_window(4, 4) is None
    note(monitor, 1.0, 3.0)
    assert monitor.end_window(4, 4) is None
    note(monitor, 2.0, 4.0)
    step = monitor.end_window(4, 4)
    assert step is not None
    assert step.grow is Role.PREFILL


def test_two_windows_are_compared() -> None:
    monitor = RatioMonitor()
    assert monitor.end_window(4, 4) is None, "nothing finished"
    note(monitor, 1.0, 4.0)
    assert monitor.end_window(4, 4) is None, "nothing to compare with"
    note(monitor, 4.0, 7.0)
    note(monitor, 6.0, 9.0)
    step = monitor.end_window(4, 4)
    assert step is not None
    assert (step.grow, step.reason) == (Role.PREFILL, RatioReason.PREFILL_GREW)
    note(monitor, 1.0, 20.0)
    step = monitor.end_window(4, 4)
    assert step is not None
    assert step.grow is Role.DECODE


def test_counts_say_the_same_as_times() -> None:
    """Ten requests per second, one second in prefill and three in decode; then five and three."""
    timed, counted = RatioMonitor(), RatioMonitor()
    for prefill_s in (1.0, 5.0):
        for _ in range(20):
            timed.note(prefill_s, prefill_s + 3.0)
        for _ in range(2):
            counted.observe(10 * prefill_s, 30.0, 10, 1.0)
        ends = [each.end_window(4, 4) for each in (timed, counted)]
    assert ends[0] == ends[1]
    assert ends[0] is not None
    assert ends[0].grow is Role.PREFILL


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "reason"),
    [
        (1.0, 3.0, RatioReason.STEADY),
        (5.0, 3.0, RatioReason.PREFILL_GREW),
        (1.0, 7.0, RatioReason.DECODE_GREW),
    ],
)
def test_counts_over_any_time_continue_what_times_began(
    prefill_s: float, decode_s: float, reason: RatioReason
) -> None:
    """Ten requests per second, counted every two seconds, after a window of timed ones."""
    monitor = RatioMonitor()
    note(monitor, 1.0, 4.0)
    assert monitor.end_window(4, 4) is None
    for _ in range(3):
        monitor.observe(10 * prefill_s, 10 * decode_s, 20, 2.0)
    step = monitor.end_window(4, 4)
    assert step is not None
    assert step.reason is reason


def test_a_change_that_is_spread_over_windows_is_seen_once() -> None:
    """From one window to the next neither the time nor the share of prefill rises by a tenth."""
    monitor = RatioMonitor()
    steps = []
    for prefill_s, decode_s in ((1.0, 2.0), (1.15, 2.05), (1.31, 2.1), (1.45, 2.12), (1.5, 2.12)):
        note(monitor, prefill_s, prefill_s + decode_s)
        steps.append(monitor.end_window(4, 4))
    assert [step and step.grow for step in steps] == [None, None, Role.PREFILL, None, None]


def test_what_lasts_becomes_usual_and_what_is_faster_at_once() -> None:
    monitor = RatioMonitor()

    def window(prefill_s: float, decode_s: float) -> RatioReason | None:
        note(monitor, prefill_s, prefill_s + decode_s)
        step = monitor.end_window(4, 4)
        return None if step is None else step.reason

    assert window(1.0, 2.0) is None
    reasons = [window(1.5, 3.0) for _ in range(12)]  # slower, and no role more than the other
    assert set(reasons) == {RatioReason.UNCLEAR, RatioReason.STEADY}
    assert reasons == sorted(reasons, key=reasons.index), "once usual, it stays so"
    assert window(0.5, 1.0) is RatioReason.STEADY
    assert window(1.0, 1.0) is RatioReason.PREFILL_GREW


def test_a_window_is_a_mean_over_all_its_requests() -> None:
    monitor = RatioMonitor()
    note(monitor, 1.0, 4.0)
    monitor.end_window(4, 4)
    for prefill_s, total_s in ((0.5, 2.0), (0.5, 2.0), (2.0, 8.0)):
        note(monitor, prefill_s, total_s)
    step = monitor.end_window(4, 4)
    assert step is not None
    assert step.reason is RatioReason.STEADY
