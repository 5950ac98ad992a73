"""Route policies of other systems, for comparison.

Tests: tests/unit/policy/test_composition.py, tests/unit/sim/test_systems.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.types import Role
from kvmesh.policy.ranking import Rank, RoutePolicy, Standing

CACHE_THRESHOLD = 0.3
"""Fraction of the prompt that must be cached for the cache to decide. This and the next two are
from SGLang's router."""

BALANCE_REQUESTS = 64
BALANCE_RATIO = 1.5
"""Load alone decides if the busiest worker has more than `BALANCE_REQUESTS` requests more than the
idlest one, and more than `BALANCE_RATIO` times as many."""


def _connections(standing: Standing) -> Rank:
    """Ranks by prompts accepted or queued: P/D-Serve's baseline, which counts connections."""
    return (standing.worker.prefill_used,)


def _decode_share(standing: Standing) -> Rank:
    return (standing.decode_full, standing.decode_share)


def _pending_tokens(standing: Standing) -> Rank:
    """Ranks by tokens reported as accepted and not computed; cached tokens do not matter."""
    return (standing.worker.pending_tokens,)


def _requests(standing: Standing) -> int:
    """Returns the number of requests that the worker has accepted and not finished."""
    worker = standing.worker
    return worker.prefill_used if worker.info.role is Role.PREFILL else worker.decode_used


def _is_uneven(standings: Sequence[Standing]) -> bool:
    requests = [_requests(each) for each in standings]
    most, least = max(requests, default=0), min(requests, default=0)
    return most - least > BALANCE_REQUESTS and most > BALANCE_RATIO * least


def _cache_aware(standing: Standing) -> Rank:
    """Ranks by the longest prefix if it is long enough and load is even, else by fewest requests.

    As in SGLang's router.
    """
    share = standing.cached_tokens / max(standing.query.num_tokens, 1)
    if share > CACHE_THRESHOLD and not standing.uneven:
        return (0, -share, _requests(standing))
    return (1, _requests(standing))


def _cache_centric(standing: Standing) -> Rank:
    """Ranks by estimated TTFT: tokens that wait, plus tokens neither cached nor fetched.

    As in Mooncake's conductor.
    """
    worker = standing.worker
    return (worker.pending_tokens + standing.uncached_tokens - standing.saved_tokens,)


LEAST_QUEUE = RoutePolicy(
    "least_queue", _connections, _decode_share, _connections, reads_cache=False
)
PENDING_TOKENS = RoutePolicy(
    "pending_tokens", _pending_tokens, _decode_share, _pending_tokens, reads_cache=False
)
CACHE_AWARE = RoutePolicy(
    "cache_aware", _cache_aware, _decode_share, _cache_aware, is_uneven=_is_uneven
)
CACHE_CENTRIC = RoutePolicy(
    "cache_centric", _cache_centric, _decode_share, _cache_centric, fetches=True
)
