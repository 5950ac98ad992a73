from __future__ import annotations

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.sending import Life, SendingMeter, SendingTotal


def told(**totals: tuple[float, float]) -> dict[Life, SendingTotal]:
    return {(WorkerId(name), 1): SendingTotal(*total) for name, total in totals.items()}


def test_a_share_is_of_the_time_between_reports_however_many_a_cycle_saw() -> None:
    meter = SendingMeter()
    assert meter.observe(told(a=(10.0, 7.0))) == 0.0, "what was before is not of this cycle"
    assert meter.observe(told(a=(10.5, 7.25))) == pytest.approx(0.5)
    assert meter.observe(told(a=(12.0, 8.0))) == pytest.approx(0.5)


def test_of_two_that_send_half_of_the_time_one_does_three_quarters_of_it() -> None:
    meter = SendingMeter()
    meter.observe(told(a=(0.0, 0.0), b=(0.3, 0.0)))
    assert meter.observe(told(a=(1.0, 0.5), b=(1.3, 0.5))) == pytest.approx(0.75)


def test_a_report_that_is_lost_changes_nothing_and_the_next_one_tells_of_all_the_time() -> None:
    meter = SendingMeter()
    meter.observe(told(a=(0.0, 0.0)))
    assert meter.observe(told(a=(1.0, 0.6))) == pytest.approx(0.6)
    assert meter.observe(told(a=(1.0, 0.6))) == pytest.approx(0.6)
    assert meter.observe(told(a=(3.0, 0.8))) == pytest.approx(0.1)


def test_who_left_leaves_no_share_behind() -> None:
    meter = SendingMeter()
    meter.observe(told(a=(0.0, 0.0), b=(0.0, 0.0)))
    assert meter.observe(told(a=(1.0, 1.0), b=(1.0, 0.2))) == 1.0
    assert meter.observe(told(b=(2.0, 0.4))) == pytest.approx(0.2)
    assert meter.observe({}) == 0.0


def test_another_life_counts_anew_even_where_its_total_is_higher() -> None:
    meter = SendingMeter()
    meter.observe(told(a=(0.0, 0.0)))
    meter.observe(told(a=(1.0, 0.5)))
    again: Life = (WorkerId("a"), 2)
    assert meter.observe({again: SendingTotal(2.0, 0.9)}) == 0.0
    assert meter.observe({again: SendingTotal(3.0, 1.2)}) == pytest.approx(0.3)
