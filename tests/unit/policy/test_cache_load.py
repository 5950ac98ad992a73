from __future__ import annotations

import pytest

from kvmesh.policy.cache_load import CachedRequest, PoolHardware, cache_load

HARDWARE = PoolHardware(num_workers=4, memory_bytes_per_s=1e12, flops=1e14, hidden_size=1000)


def test_memory_bound_by_hand() -> None:
    """4 * 1000 * (9999 + 1) bytes against 4 * 1e12 * 1e-5 that the workers could read."""
    load = cache_load([CachedRequest(9999, 1)], 1e-5, HARDWARE)
    assert load == pytest.approx(0.5)


def test_compute_bound_by_hand() -> None:
    """2 * 1000 * 1e6 * 1000 operations against 4 * 1e14 * 5e-3."""
    load = cache_load([CachedRequest(1_000_000, 1000)], 5e-3, HARDWARE)
    assert load == pytest.approx(2e12 / (2e12 + 2e12))


def test_more_prefix_is_more_load_and_never_all() -> None:
    loads = [cache_load([CachedRequest(n, 10)], 1e-3, HARDWARE) for n in (0, 10**4, 10**6, 10**9)]
    assert loads == sorted(loads)
    assert loads[-1] < 1


def test_nothing_is_no_load() -> None:
    assert cache_load([], 0.0, HARDWARE) == 0.0
