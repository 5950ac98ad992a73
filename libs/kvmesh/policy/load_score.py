"""FlowKV's load score: twelve indicators of a worker give one score per side, and the fleet's mean
scores give one of three regimes.

Source: FlowKV appendix B.2 and Algorithm 1. The paper leaves weights and thresholds open; they are
ours. Tests: tests/unit/policy/test_load_score.py.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.summary_statistics import mean
from kvmesh.core.types import WorkerId
from kvmesh.core.values import quick


@dataclass(frozen=True, slots=True)
class Queues:
    """Queue lengths of one side of a worker.

    Attributes:
        sending: requests whose prefill is done and whose KV the decode worker has not got yet.
    """

    running: float = 0.0
    waiting: float = 0.0
    swapped: float = 0.0
    sending: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadState:
    """The vector S_i of B.2; the last four entries are fractions 0..1 of the whole worker.

    Attributes:
        budget_used: fraction of the step's token budget in use. The paper's T_b is the budget
            itself, which falls with load; its use grows with load, as all other entries do.
        blocks_used: KV_u.
        compute_used: G_u.
        memory_bandwidth_used: MB_u.
    """

    prefill: Queues
    decode: Queues
    budget_used: float = 0.0
    blocks_used: float = 0.0
    compute_used: float = 0.0
    memory_bandwidth_used: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Divisors of the queue lengths, so that 1 is a full side of any worker."""

    prefill_slots: int
    decode_slots: float


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights w of the indicators for one side; scores are relative to `full`."""

    running: float
    waiting: float
    swapped: float
    sending: float
    budget: float
    blocks: float
    compute: float
    memory_bandwidth: float

    @property
    def full(self) -> float:
        """Weighted sum of a full, healthy worker: it neither queues nor swaps."""
        return self.running + self.budget + self.blocks + self.compute + self.memory_bandwidth


PREFILL_WEIGHTS = Weights(
    running=1.0,
    waiting=2.0,
    swapped=1.0,
    sending=0.5,
    budget=1.0,
    blocks=0.5,
    compute=1.0,
    memory_bandwidth=0.0,
)
"""Weights for prefill, which is bound by compute; waiting requests weigh more than running ones."""

DECODE_WEIGHTS = Weights(
    running=1.0,
    waiting=2.0,
    swapped=2.0,
    sending=0.5,
    budget=0.5,
    blocks=1.0,
    compute=0.0,
    memory_bandwidth=1.0,
)
"""Weights for decode, which is bound by memory: its bandwidth and its blocks."""


@dataclass(frozen=True, slots=True)
class Score:
    """C_i^p and C_i^d: 0 when idle, about 1 when all is in use, more when requests wait."""

    prefill: float
    decode: float


# For speed, as in `core/types.py`: each cycle makes these for every worker of the fleet.
for _often_made in (Capacity, LoadState, Queues, Score):
    quick(_often_made)

_PREFILL_FULL, _DECODE_FULL = PREFILL_WEIGHTS.full, DECODE_WEIGHTS.full


def score(state: LoadState, capacity: Capacity) -> Score:
    """Returns C_i^p and C_i^d of one worker, from its normalised indicators (B.2)."""
    prefill = _weigh(state, state.prefill, capacity.prefill_slots, PREFILL_WEIGHTS)
    decode = _weigh(state, state.decode, capacity.decode_slots, DECODE_WEIGHTS)
    return Score(prefill / _PREFILL_FULL, decode / _DECODE_FULL)


def _weigh(state: LoadState, queues: Queues, slots: float, weights: Weights) -> float:
    lengths = (
        weights.running * queues.running
        + weights.waiting * queues.waiting
        + weights.swapped * queues.swapped
        + weights.sending * queues.sending
    )
    shares = (
        weights.budget * state.budget_used
        + weights.blocks * state.blocks_used
        + weights.compute * state.compute_used
        + weights.memory_bandwidth * state.memory_bandwidth_used
    )
    return lengths / max(slots, 1) + shares


class ScoreWindow:
    """Means of a worker's scores over the last seconds, so that a burst does not count as a trend.

    The first sample of a worker counts alone, because waiting for more would leave a fleet that
    starts full unbalanced. If it hits a burst, that costs one turn of help, which ends after
    `SwitchLimits.min_cycles`.

    Args:
        window_s: length of the window in seconds; older samples are dropped.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, Score]] = deque()

    def add(self, sample: Score, now: float) -> None:
        """Adds a sample; `now` is monotonic."""
        self._samples.append((now, sample))
        while self._samples[0][0] <= now - self._window_s:
            self._samples.popleft()

    @property
    def mean(self) -> Score:
        """Mean of the samples in the window; 0 without samples."""
        count = len(self._samples) or 1
        prefill = decode = 0.0
        for _, sample in self._samples:
            prefill += sample.prefill
            decode += sample.decode
        return Score(prefill / count, decode / count)


class Regime(enum.Enum):
    """The three branches of Algorithm 1."""

    NORMAL = "both sides are within their capacity"
    IMBALANCED = "one side is above its capacity, the fleet is not"
    EXTREME = "the fleet's size does not fit its load"


@dataclass(frozen=True, slots=True)
class RegimeLimits:
    """Thresholds of Algorithm 1, per side."""

    prefill_low: float = 0.7
    prefill_high: float = 1.5
    decode_low: float = 0.7
    decode_high: float = 1.5


def classify(fleet: Score, limits: RegimeLimits | None = None) -> Regime:
    """Returns the branch of Algorithm 1 for the fleet's mean scores C^p and C^d."""
    limits = limits or RegimeLimits()
    prefill, decode = abs(fleet.prefill), abs(fleet.decode)
    if prefill <= limits.prefill_low and decode <= limits.decode_low:
        return Regime.NORMAL
    if prefill <= limits.prefill_high and decode <= limits.decode_high:
        return Regime.IMBALANCED
    return Regime.EXTREME


@dataclass(frozen=True, slots=True)
class ScoredWorker:
    """A worker with its smoothed score.

    Attributes:
        prefills: whether it is on the prefill side now.
    """

    worker_id: WorkerId
    prefills: bool
    score: Score

    @property
    def own_score(self) -> float:
        """The score of the side that it is on: C_i."""
        return self.score.prefill if self.prefills else self.score.decode


quick(ScoredWorker)


def fleet_score(workers: Sequence[ScoredWorker]) -> Score:
    """Returns C^p over the prefill side and C^d over the decode side; 0 without workers."""
    prefill = [worker.own_score for worker in workers if worker.prefills]
    decode = [worker.own_score for worker in workers if not worker.prefills]
    return Score(mean(prefill), mean(decode))
