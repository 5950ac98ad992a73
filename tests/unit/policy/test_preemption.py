from __future__ import annotations

import pytest

from kvmesh.policy.preemption import choose_preemption, with_sample, without_copy


@pytest.mark.parametrize(("compute_s", "byte_s"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_what_is_unknown_is_tried(compute_s: float, byte_s: float) -> None:
    assert choose_preemption(compute_s, 1 << 40, byte_s).swap


@pytest.mark.parametrize(("byte_s", "swap"), [(4.9e-7, True), (5.1e-7, False)])
def test_the_cheaper_way_is_taken(byte_s: float, swap: bool) -> None:
    # Twice a million bytes against a second.
    decision = choose_preemption(1.0, 1_000_000, byte_s)
    assert decision.swap is swap
    assert "computing again 1.0000 s" in decision.reason


def test_samples_fade() -> None:
    mean = with_sample(0.0, 5.0)
    assert mean == 5.0
    for _ in range(40):
        mean = with_sample(mean, 1.0)
    assert mean == pytest.approx(1.0, abs=1e-2)


def test_a_slow_copy_is_tried_again_after_some_decisions_against_it() -> None:
    # Three times as dear as computing again.
    byte_s, declined = 1.5e-6, 0
    while not choose_preemption(1.0, 1_000_000, byte_s).swap:
        byte_s, declined = without_copy(byte_s), declined + 1
    assert 10 < declined < 30
