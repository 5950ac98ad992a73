"""Chooses how a worker gets a prompt's prefix: compute it, load it from its own tiers, fetch it
from a holder, or query it there.

Pure. All costs are in computed tokens, the unit of `ranking.Standing.first_token`. A fetched token
costs the fraction of a token's compute time that its KV takes to travel; a query costs its measured
time. Among holders of equally many blocks, power of two choices picks the reader's source
(TokenLake 4.3).
Source: PrfaaS 3.3 (prefix transfer), TokenLake 4. Tests: tests/unit/policy/test_prefix_source.py.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvmesh.core.types import WorkerLoad
from kvmesh.policy.holders import Lower

T = TypeVar("T")

ASK_CHUNK_TOKENS = 512
"""Number of new tokens whose queries go out together; the default token budget of a step."""

MIN_FETCH_TOKENS = 128
"""Minimum number of tokens to fetch: fewer are computed in about the time of the request for them.
"""

INSIDE_SHARE = 0.05
"""Time for a token's KV to travel within a cluster, as a fraction of its compute time; used until
both are measured."""

BETWEEN_SHARE = 0.5
"""Same as `INSIDE_SHARE`, but from one cluster to another: so much is worth a first try, which
measures the link in this direction."""

HOST_SHARE = 0.05
"""Time to load a token's KV from host memory, as a fraction of its compute time; used until both
are measured. It is not smaller because accelerators compute fast behind a narrow host bus."""

DISK_SHARE = 0.25
"""Same as `HOST_SHARE`, but from disk."""

OVERHEAD_S = 0.005
"""Seconds that a fetch of any length takes for its lease, first read and last answer."""

OVERHEAD_TOKENS = 64.0
"""Same as `OVERHEAD_S`, in computed tokens; used until the compute time of a token is measured."""

WORTH = 0.8
"""Largest cost of a fetch relative to computing: a saving of less than a fifth is not worth the
holder's work."""


@dataclass(frozen=True, slots=True)
class FetchPace:
    """Times measured in a model's fleet, in seconds; 0 where not known yet.

    Attributes:
        token_s: to compute a prompt token.
        inside_token_s: for a token's KV to travel within a cluster.
        between_token_s: for a token's KV to travel from one cluster to another, by their names:
            source, target. Directions that were not measured are absent.
        ask_chunk_s: for the remote queries of one chunk in all layers, without their attention.
        ask_pair_s: of attention per pair of a new token and a prefix token.
        reach_tokens: longest prompt of which `token_s` tells: the measured ones were much shorter
            than longer ones, and took more time per token, because each takes some time of its own.
    """

    token_s: float = 0.0
    inside_token_s: float = 0.0
    between_token_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    ask_chunk_s: float = 0.0
    ask_pair_s: float = 0.0
    reach_tokens: float = math.inf

    def share(self, source: str, target: str) -> float:
        """Returns the cost of a token that a cluster fetches from another, in computed tokens."""
        if source == target:
            return self.inside_share
        travel_s = self.between_token_s.get((source, target), 0.0)
        return travel_s / self.token_s if self.token_s and travel_s else BETWEEN_SHARE

    @property
    def inside_share(self) -> float:
        """Cost of a token that is fetched within a cluster, in computed tokens."""
        known = self.token_s and self.inside_token_s
        return self.inside_token_s / self.token_s if known else INSIDE_SHARE

    @property
    def overhead_tokens(self) -> float:
        """Fixed cost of a fetch, in computed tokens."""
        return OVERHEAD_S / self.token_s if self.token_s else OVERHEAD_TOKENS

    def load_tokens(self, lower: Lower, block_size: int, load: WorkerLoad) -> float:
        """Returns the cost of bringing up blocks from below a worker's pool, in computed tokens.

        Args:
            load: its report, with the measured times of its tiers.
        """
        host = self._up_tokens(lower.host * block_size, load.host_token_s, HOST_SHARE)
        return host + self._up_tokens(lower.disk * block_size, load.disk_token_s, DISK_SHARE)

    def _up_tokens(self, num_tokens: int, up_token_s: float, share: float) -> float:
        if self.token_s and up_token_s:
            share = up_token_s / self.token_s
        return num_tokens * share

    def ask_tokens(self, num_new: int, num_remote: int) -> float | None:
        """Returns the cost of querying a remote prefix, in computed tokens; None: not known."""
        if not self.token_s or not self.ask_chunk_s:
            return None
        num_chunks = -(-num_new // ASK_CHUNK_TOKENS)
        seconds = num_chunks * self.ask_chunk_s + num_new * num_remote * self.ask_pair_s
        return seconds / self.token_s


class Way(enum.Enum):
    """Way to get a prefix that is not in the worker's pool."""

    COMPUTE = "compute"
    LOAD = "load"
    FETCH = "fetch"
    ASK = "ask"


def cheapest_way(
    compute: float,
    fetch: float | None,
    ask: float | None,
    load: float | None = None,
    *,
    worth: float = 1.0,
) -> tuple[Way, float]:
    """Returns the cheapest way, and its cost in the unit of the arguments.

    Ties go to computing, then loading, then fetching, then querying.

    Args:
        fetch, ask, load: costs; None where that way is impossible or its cost unknown.
        worth: a fetch or query involves another worker, so it may cost at most this fraction of the
            cheapest way without one.
    """
    best = (Way.COMPUTE, compute)
    if load is not None and load < compute:
        best = (Way.LOAD, load)
    most = worth * best[1]
    for way, cost in ((Way.FETCH, fetch), (Way.ASK, ask)):
        if cost is not None and cost <= most and cost < best[1]:
            best = (way, cost)
    return best


def saved_tokens(
    num_missing: int, queued_tokens: float, overhead_tokens: float, share: float
) -> float:
    """Returns the computed tokens that a fetch saves; 0 if it is not worth it.

    Args:
        num_missing: tokens that the worker lacks and the holder has; at least `MIN_FETCH_TOKENS`.
        queued_tokens: tokens whose KV leaves the holder before.
        overhead_tokens, share: from `FetchPace`; computed once per route, as it weighs many
            workers.
    """
    cost = overhead_tokens + (num_missing + queued_tokens) * share
    return num_missing - cost if cost <= WORTH * num_missing else 0.0


def choose_holder(
    holders: Sequence[T], load: Callable[[T], tuple[float, ...]], rng: random.Random
) -> T:
    """Returns the less loaded of two random holders (power of two choices, TokenLake 4.3)."""
    two = rng.sample(holders, 2) if len(holders) > 2 else holders
    return min(two, key=load)
