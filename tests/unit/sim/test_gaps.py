from __future__ import annotations

import math

import pytest

from kvmesh.sim.gaps import Gaps


def test_nothing_is_known_of_no_token() -> None:
    assert math.isnan(Gaps().percentile(99))


def test_percentiles_are_those_of_all_counts() -> None:
    gaps, others = Gaps(), Gaps()
    gaps.add(0.02, 980)
    others.add(0.5, 20)
    others.add(0.0, 5)  # at once: no gap
    gaps.merge(others)
    assert gaps.percentile(50) == pytest.approx(0.02, rel=0.02)
    assert gaps.percentile(98) == pytest.approx(0.02, rel=0.02)
    assert gaps.percentile(99) == pytest.approx(0.5, rel=0.02)
    assert gaps.percentile(100) == pytest.approx(0.5, rel=0.02)
