from __future__ import annotations

import pytest

from kvmesh.runtime.step_meter import WINDOW_S, StepMeter


def test_shares_by_kind_of_step() -> None:
    meter = StepMeter(budget_tokens=100)
    meter.add(0.3, computed_total=80, generated_total=0, now=0.3)  # part of a prompt
    assert meter.last_prompt_tokens == 80
    meter.add(0.2, computed_total=84, generated_total=4, now=0.5)  # four sequences decode
    assert meter.last_prompt_tokens == 0
    assert meter.compute_used(0.5) == pytest.approx(0.3)
    assert meter.memory_bandwidth_used(0.5) == pytest.approx(0.2)
    assert meter.budget_used(0.5) == pytest.approx(0.04)


def test_last_part_of_a_prompt_beside_decodes_is_compute() -> None:
    meter = StepMeter(100)
    meter.add(0.1, computed_total=12, generated_total=3, now=1.0)
    assert meter.compute_used(1.0) == pytest.approx(0.1)
    assert meter.memory_bandwidth_used(1.0) == 0.0


def test_what_is_older_than_the_window_is_forgotten() -> None:
    meter = StepMeter(100)
    meter.add(0.4, computed_total=100, generated_total=0, now=1.0)
    assert meter.budget_used(1.9) == 1.0
    assert meter.compute_used(1.0 + WINDOW_S) == 0.0
    assert meter.budget_used(1.0 + WINDOW_S) == 0.0


def test_shares_end_at_one() -> None:
    meter = StepMeter(10)
    meter.add(3.0, computed_total=40, generated_total=0, now=3.0)
    assert (meter.compute_used(3.0), meter.budget_used(3.0)) == (1.0, 1.0)
