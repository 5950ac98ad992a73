"""Predicts the fraction of the devices that the pool's attention takes from the next batches.

Source: TokenLake 6.1. Tests: tests/unit/policy/test_cache_load.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolHardware:
    """The identical workers of a pool.

    Attributes:
        num_workers: N.
        memory_bytes_per_s: B_mem, memory bandwidth of one worker.
        flops: F, FLOP/s of one worker.
        hidden_size: d.
    """

    num_workers: int
    memory_bytes_per_s: float
    flops: float
    hidden_size: int


@dataclass(frozen=True, slots=True)
class CachedRequest:
    """A request of the next step: tokens cached in the pool, and tokens to compute."""

    prefix_tokens: int
    input_tokens: int


def cache_load(
    requests: Sequence[CachedRequest], compute_s: float, hardware: PoolHardware
) -> float:
    """Returns L, the fraction 0..1 of each device that queries to the pool take (6.1).

    It is the same on all devices, because the pool's load is balanced.

    Args:
        compute_s: T_r, the least time of the requests with all devices fully used.
    """
    bytes_read = sum(
        4 * hardware.hidden_size * (request.prefix_tokens + request.input_tokens)
        for request in requests
    )
    operations = sum(
        2 * hardware.hidden_size * request.prefix_tokens * request.input_tokens
        for request in requests
    )
    return max(
        _share(bytes_read, hardware.num_workers * hardware.memory_bytes_per_s * compute_s),
        _share(operations, hardware.num_workers * hardware.flops * compute_s),
    )


def _share(demand: float, rest: float) -> float:
    return demand / (demand + rest) if demand else 0.0
