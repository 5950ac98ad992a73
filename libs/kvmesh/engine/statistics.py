"""Counters and current state of an engine. Tests: tests/unit/engine/test_core.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.engine.swap_space import SwapStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counters since start, and current counts.

    Attributes:
        damaged_total: sequences that ended because their logits contained NaN or infinity.
    """

    num_running: int
    num_held: int
    num_preempted: int
    blocks_free: int
    prompt_tokens_total: int
    cached_tokens_total: int
    computed_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    steps_total: int
    damaged_total: int
    swap: SwapStatistics
