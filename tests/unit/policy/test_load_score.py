from __future__ import annotations

import dataclasses

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.load_score import (
    Capacity,
    LoadState,
    Queues,
    Regime,
    RegimeLimits,
    Score,
    ScoredWorker,
    ScoreWindow,
    classify,
    fleet_score,
    score,
)

CAPACITY = Capacity(prefill_slots=4, decode_slots=16)
IDLE = LoadState(Queues(), Queues())
FULL = LoadState(Queues(running=4), Queues(running=16), 1.0, 1.0, 1.0, 1.0)


def test_idle_is_zero_and_full_is_one() -> None:
    assert score(IDLE, CAPACITY) == Score(0.0, 0.0)
    full = score(FULL, CAPACITY)
    assert (full.prefill, full.decode) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("queue", ["running", "waiting", "swapped", "sending"])
def test_each_queue_counts_for_its_side(queue: str) -> None:
    one = dataclasses.replace(Queues(), **{queue: 1.0})
    in_prefill = score(dataclasses.replace(IDLE, prefill=one), CAPACITY)
    assert in_prefill.prefill > 0
    assert in_prefill.decode == 0
    in_decode = score(dataclasses.replace(IDLE, decode=one), CAPACITY)
    assert in_decode.decode > 0
    assert in_decode.prefill == 0


@pytest.mark.parametrize(
    ("state", "sides"),
    [
        (dataclasses.replace(IDLE, budget_used=1.0), (True, True)),
        (dataclasses.replace(IDLE, blocks_used=1.0), (True, True)),
        (dataclasses.replace(IDLE, compute_used=1.0), (True, False)),
        (dataclasses.replace(IDLE, memory_bandwidth_used=1.0), (False, True)),
    ],
)
def test_shares_count_where_they_bind(state: LoadState, sides: tuple[bool, bool]) -> None:
    found = score(state, CAPACITY)
    assert (found.prefill > 0, found.decode > 0) == sides


def test_scores_of_workers_of_different_size_are_comparable() -> None:
    small = score(LoadState(Queues(running=2), Queues()), Capacity(4, 4))
    large = score(LoadState(Queues(running=32), Queues()), Capacity(64, 4))
    assert small == large


def test_the_window_forgets() -> None:
    window = ScoreWindow(window_s=10.0)
    assert window.mean == Score(0.0, 0.0)
    window.add(Score(1.0, 0.0), now=0.0)
    window.add(Score(0.0, 1.0), now=5.0)
    assert window.mean == Score(0.5, 0.5)
    window.add(Score(0.0, 1.0), now=10.0)
    assert window.mean == Score(0.0, 1.0)


@pytest.mark.parametrize(
    ("prefill", "decode", "regime"),
    [
        (0.7, 0.7, Regime.NORMAL),
        (0.71, 0.1, Regime.IMBALANCED),
        (0.1, 0.71, Regime.IMBALANCED),
        (1.5, 1.5, Regime.IMBALANCED),
        (1.51, 0.0, Regime.EXTREME),
        (0.0, 1.51, Regime.EXTREME),
        (-0.9, 0.0, Regime.IMBALANCED),
    ],
)
def test_algorithm_1_has_three_branches(prefill: float, decode: float, regime: Regime) -> None:
    assert classify(Score(prefill, decode), RegimeLimits()) is regime


def test_each_side_counts_its_own_workers() -> None:
    workers = [
        ScoredWorker(WorkerId("p"), True, Score(0.4, 9.0)),
        ScoredWorker(WorkerId("q"), True, Score(0.6, 9.0)),
        ScoredWorker(WorkerId("d"), False, Score(9.0, 0.2)),
    ]
    fleet = fleet_score(workers)
    assert (fleet.prefill, fleet.decode) == pytest.approx((0.5, 0.2))
    assert fleet_score(workers[:2]).decode == 0
