from __future__ import annotations

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.pdserve import InstanceProfile, RatioReason, RatioStep
from kvmesh.policy.ratio_monitor import (
    HOLD_WINDOWS,
    MIN_REQUESTS,
    RatioMonitor,
    StageCounts,
)
from kvmesh.policy.waiting import Waiting

RATE = 10
"""Requests per second; at it one request in a stage is a tenth of a second of everyone's time."""


def window(
    monitor: RatioMonitor,
    prefill_s: float,
    decode_s: float,
    waiting: tuple[float, float] = (0.0, 0.0),
    ratio: tuple[int, int] = (4, 4),
    profile: InstanceProfile | None = None,
) -> RatioStep | None:
    """Fifteen seconds in which requests take and wait so long."""
    for _ in range(15):
        counts = StageCounts(
            Waiting(RATE * waiting[0], RATE * waiting[1]), RATE * prefill_s, RATE * decode_s
        )
        monitor.observe(counts, RATE, 1.0)
    return ended(monitor, ratio, profile)


def ended(
    monitor: RatioMonitor, ratio: tuple[int, int], profile: InstanceProfile | None = None
) -> RatioStep | None:
    """A window's end; what it asks for is done."""
    step = monitor.end_window(*ratio, profile)
    monitor.carried_out()
    return step


def reason(step: RatioStep | None) -> RatioReason | None:
    return None if step is None else step.reason


def test_few_requests_are_no_window_and_count_for_the_next() -> None:
    monitor = RatioMonitor()
    counts = StageCounts(Waiting(0.0, 0.0), 1.0, 1.0)
    monitor.observe(counts, MIN_REQUESTS - 1, 1.0)
    assert monitor.end_window(4, 4) is None
    monitor.observe(counts, 1, 1.0)
    assert reason(monitor.end_window(4, 4)) is RatioReason.STEADY


@pytest.mark.parametrize(
    ("waiting", "grow"), [((2.0, 0.0), Role.PREFILL), ((0.0, 2.0), Role.DECODE)]
)
def test_who_waits_in_the_first_window_shows_which_role_is_short(
    waiting: tuple[float, float], grow: Role
) -> None:
    step = window(RatioMonitor(), 1.0, 1.0, waiting)
    assert step is not None
    assert step.grow is grow


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "waiting", "says"),
    [
        (1.0, 3.0, (0.5, 0.0), RatioReason.STEADY),  # as random arrivals make some wait
        (1.0, 3.0, (1.5, 4.5), RatioReason.UNCLEAR),  # both are short
        (0.1, 16.0, (0.09, 14.4), RatioReason.DECODE_GREW),  # nobody waits for prefill to speak of
        (16.0, 0.1, (14.4, 0.09), RatioReason.PREFILL_GREW),
        (2.5, 3.0, (0.0, 0.0), RatioReason.PREFILL_GREW),  # nobody waits, prompts are slower
        (1.0, 5.0, (0.0, 0.0), RatioReason.DECODE_GREW),  # nobody waits, steps are slower
        (1.5, 4.5, (0.0, 0.0), RatioReason.UNCLEAR),
    ],
)
def test_a_window_against_what_is_usual(
    prefill_s: float, decode_s: float, waiting: tuple[float, float], says: RatioReason
) -> None:
    monitor = RatioMonitor()
    assert reason(window(monitor, 1.0, 3.0)) is RatioReason.STEADY
    assert reason(window(monitor, prefill_s, decode_s, waiting)) is says


def test_a_share_near_one_still_rises() -> None:
    step = window(RatioMonitor(), 9.5, 0.5, (5.0, 0.0))
    assert reason(step) is RatioReason.PREFILL_GREW


def test_a_change_that_is_spread_over_windows_is_seen() -> None:
    """From one window to the next neither the time nor the share of prefill rises by a tenth."""
    monitor = RatioMonitor()
    steps = []
    for prefill_s, decode_s in ((1.0, 2.0), (1.15, 2.05), (1.31, 2.1), (1.45, 2.12), (1.5, 2.12)):
        steps.append(reason(window(monitor, prefill_s, decode_s)))
    assert steps[0] is RatioReason.STEADY
    assert steps.count(RatioReason.PREFILL_GREW) == 1


def test_what_lasts_becomes_usual_and_waiting_never_does() -> None:
    monitor = RatioMonitor()
    window(monitor, 1.0, 2.0)
    reasons = [reason(window(monitor, 1.5, 3.0)) for _ in range(12)]
    assert reasons[0] is RatioReason.UNCLEAR
    assert reasons[-1] is RatioReason.STEADY
    for _ in range(12):  # the other role has none to spare
        step = window(monitor, 1.5, 3.0, (3.0, 0.0), ratio=(4, 2))
        assert reason(step) is RatioReason.AT_MINIMUM


def test_after_relief_the_way_back_is_held() -> None:
    """The role that gave has more to do than before: that alone is no reason."""
    monitor = RatioMonitor()
    window(monitor, 1.0, 1.0)
    assert reason(window(monitor, 1.0, 1.0, (3.0, 0.0))) is RatioReason.PREFILL_GREW
    assert reason(window(monitor, 1.0, 1.4, (1.0, 0.0))) is RatioReason.SETTLING
    held = [reason(window(monitor, 1.0, 1.6)) for _ in range(3)]
    assert held[0] is RatioReason.HOLD
    assert set(held) <= {RatioReason.HOLD, RatioReason.STEADY, RatioReason.UNCLEAR}


def test_a_time_without_requests_shortens_no_hold() -> None:
    monitor = RatioMonitor()
    window(monitor, 1.0, 1.0)
    assert reason(window(monitor, 1.0, 1.0, (3.0, 0.0))) is RatioReason.PREFILL_GREW
    assert reason(window(monitor, 1.0, 1.4, (1.0, 0.0))) is RatioReason.SETTLING
    for _ in range(2 * HOLD_WINDOWS):
        monitor.observe(StageCounts(Waiting(0.0, 0.0), 0.0, 0.0), 0, 15.0)
        assert ended(monitor, (4, 4)) is None
    assert reason(window(monitor, 1.0, 1.6)) is RatioReason.HOLD


def test_a_change_that_made_it_worse_is_taken_back_and_held_twice_as_long() -> None:
    monitor = RatioMonitor()
    assert reason(window(monitor, 1.0, 1.0, (1.0, 0.0))) is RatioReason.PREFILL_GREW
    window(monitor, 1.0, 1.0)
    step = window(monitor, 1.0, 1.0, (0.0, 3.0))
    assert step == RatioStep(Role.DECODE, RatioReason.TAKEN_BACK)
    assert reason(window(monitor, 1.0, 1.0)) is RatioReason.SETTLING
    later = [reason(window(monitor, 1.0, 1.0, (1.0, 0.0))) for _ in range(2 * HOLD_WINDOWS)]
    assert later[:-1] == [RatioReason.HOLD] * (2 * HOLD_WINDOWS - 1)
    assert later[-1] is RatioReason.PREFILL_GREW


def test_what_nobody_carried_out_holds_nothing() -> None:
    monitor = RatioMonitor()
    counts = StageCounts(Waiting(3.0 * RATE, 0.0), RATE, RATE)
    for _ in range(3):  # it goes on to ask
        monitor.observe(counts, MIN_REQUESTS, 1.0)
        assert reason(monitor.end_window(4, 4)) is RatioReason.PREFILL_GREW
    assert reason(window(monitor, 1.0, 1.0, (0.0, 3.0))) is RatioReason.DECODE_GREW


def test_a_change_that_is_not_enough_is_followed_by_another() -> None:
    monitor = RatioMonitor()
    steps = [window(monitor, 1.0, 1.0, (wait_s, 0.0)) for wait_s in (6.0, 5.0, 4.0)]
    grown = [None if step is None else step.grow for step in steps]
    assert grown == [Role.PREFILL, None, Role.PREFILL]


def test_a_load_that_moves_over_later_gets_its_instance_back() -> None:
    monitor = RatioMonitor()
    window(monitor, 1.0, 1.0, (3.0, 0.0))
    for _ in range(HOLD_WINDOWS):
        assert reason(window(monitor, 1.0, 1.0)) is not RatioReason.DECODE_GREW
    assert reason(window(monitor, 1.0, 1.0, (0.0, 0.8))) is RatioReason.DECODE_GREW


EVEN = InstanceProfile(1, 1.0, 10, 10.0)
"""Both roles serve one request per second and instance."""


def test_with_measured_speeds_the_whole_way_to_the_best_split_is_one_step() -> None:
    for waiting, ratio, grow in (
        ((2.0, 0.0), (2, 6), Role.PREFILL),
        ((0.0, 2.0), (7, 3), Role.DECODE),
    ):
        step = window(RatioMonitor(), 1.0, 1.0, waiting, ratio, EVEN)
        assert step == RatioStep(grow, RatioReason.BY_RATE, 2)
    unclear = window(RatioMonitor(), 1.0, 3.0, (1.5, 4.5), (2, 6), EVEN)
    assert unclear == RatioStep(Role.PREFILL, RatioReason.BY_RATE, 2)


def test_speeds_say_nothing_against_who_waits_and_nothing_where_nobody_does() -> None:
    against = window(RatioMonitor(), 1.0, 1.0, (2.0, 0.0), (6, 2), EVEN)
    assert reason(against) in (RatioReason.AGAINST_RATE, RatioReason.AT_MINIMUM)
    assert reason(window(RatioMonitor(), 1.0, 1.0, (2.0, 0.0), (5, 3), EVEN)) is (
        RatioReason.AGAINST_RATE
    )
    assert reason(window(RatioMonitor(), 1.0, 1.0, (0.0, 0.0), (2, 6), EVEN)) is RatioReason.STEADY


# Each second of a live load on two prefill and four decode workers that needs three and three, as
# (wait for prefill, prefilling, decoding, new); the second series is that with four prefilling.
SHORT_OF_PREFILL = (
    (0, 2, 2, 4),
    (1, 2, 0, 4),
    (0, 1, 0, 1),
    (1, 1, 1, 4),
    (0, 2, 0, 2),
    (3, 2, 1, 7),
    (2, 2, 0, 6),
    (2, 2, 1, 6),
    (1, 2, 2, 4),
    (0, 2, 1, 3),
    (1, 2, 2, 5),
    (4, 2, 1, 7),
    (10, 2, 1, 8),
    (5, 2, 1, 13),
    (6, 2, 2, 10),
    (3, 2, 0, 11),
    (5, 2, 1, 6),
    (1, 1, 1, 6),
    (3, 2, 1, 9),
    (2, 2, 1, 4),
    (0, 2, 1, 6),
    (0, 2, 0, 3),
    (2, 2, 1, 5),
    (5, 2, 1, 9),
    (0, 2, 0, 4),
)
RELIEVED = (
    (1, 2, 2, 7),
    (1, 2, 3, 5),
    (0, 1, 2, 3),
    (0, 2, 2, 5),
    (1, 3, 2, 7),
    (3, 3, 3, 8),
    (3, 3, 0, 11),
    (2, 4, 4, 13),
    (1, 4, 2, 10),
    (1, 3, 3, 6),
    (0, 2, 2, 5),
    (2, 3, 2, 10),
    (0, 4, 2, 4),
    (1, 3, 2, 5),
    (0, 2, 0, 3),
    (0, 3, 2, 6),
    (4, 4, 0, 10),
    (0, 2, 3, 3),
)


def replay(
    monitor: RatioMonitor, series: tuple[tuple[int, int, int, int], ...], ratio: tuple[int, int]
) -> list[RatioStep]:
    """What it says at windows of three seconds."""
    steps = []
    for second, (waiting, prefilling, decoding, num_new) in enumerate(series, start=1):
        monitor.observe(StageCounts(Waiting(waiting, 0.0), prefilling, decoding), num_new, 1.0)
        step = ended(monitor, ratio) if second % 3 == 0 else None
        steps += [] if step is None else [step]
    return steps


@pytest.mark.parametrize("skip", range(6))
def test_a_recorded_load_gets_its_instance_and_keeps_it(skip: int) -> None:
    """Wherever the windows begin."""
    monitor = RatioMonitor()
    asked = [each.grow for each in replay(monitor, SHORT_OF_PREFILL[skip:], (2, 4))]
    assert Role.PREFILL in asked[:4]
    assert Role.DECODE not in asked
    monitor = RatioMonitor()
    for _ in range(4):  # until it has just asked for an instance
        short = replay(monitor, SHORT_OF_PREFILL[12:15], (2, 4))
        if short and short[-1].grow is Role.PREFILL:
            break
    after = [each.grow for each in replay(monitor, RELIEVED, (4, 4))]
    assert Role.DECODE not in after
