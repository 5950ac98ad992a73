"""Route policies of other systems, for comparison.

Tests: tests/unit/policy/test_composition.py, tests/unit/sim/test_systems.py.
"""

from __future__ import annotations

from kvmesh.policy.ranking import Rank, RoutePolicy, Standing

CACHE_THRESHOLD = 0.5
"""Share of the prompt that must be cached for the cache to decide (SGLang's router)."""

BALANCE_SLOTS = 2
"""A worker with this many more prompts than slots is left out in favour of others."""


def _connections(standing: Standing) -> Rank:
    """Prompts accepted or queued: P/D-Serve's baseline, which counts connections."""
    return (standing.worker.prefill_used,)


def _decode_share(standing: Standing) -> Rank:
    return (standing.decode_full, standing.decode_share)


def _pending_tokens(standing: Standing) -> Rank:
    """Tokens that were reported as accepted and not computed, whatever of them is cached."""
    return (standing.worker.pending_tokens,)


def _cache_aware(standing: Standing) -> Rank:
    """The longest prefix if it is long enough and the worker not overloaded, else the shortest
    queue, as SGLang's router does.
    """
    share = standing.cached_tokens / max(standing.query.num_tokens, 1)
    overloaded = standing.worker.prefill_used >= BALANCE_SLOTS + standing.worker.info.prefill_slots
    if share > CACHE_THRESHOLD and not overloaded:
        return (0, -share, standing.worker.prefill_used)
    return (1, standing.worker.prefill_used)


def _cache_centric(standing: Standing) -> Rank:
    """The least estimated time to the first token: what waits, then what is not cached here, as in
    Mooncake's conductor.
    """
    return (standing.worker.pending_tokens + standing.uncached_tokens,)


LEAST_QUEUE = RoutePolicy(
    "least_queue", _connections, _decode_share, _connections, reads_cache=False
)
PENDING_TOKENS = RoutePolicy(
    "pending_tokens", _pending_tokens, _decode_share, _pending_tokens, reads_cache=False
)
CACHE_AWARE = RoutePolicy("cache_aware", _cache_aware, _decode_share, _cache_aware)
CACHE_CENTRIC = RoutePolicy("cache_centric", _cache_centric, _decode_share, _cache_centric)
