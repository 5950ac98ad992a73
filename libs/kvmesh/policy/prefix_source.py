"""Whether a worker computes the start of a prompt, brings it up from its own tiers, brings it from
one that holds it, or asks there.

Pure. All are counted in the unit of `ranking.Standing.first_token`, tokens computed until the first
one: a token that is brought costs the part of a token in which its KV travels; questions cost what
was measured of them. Of several holders of as much, the less loaded of two at random is read
(TokenLake 4.3).
Source: PrfaaS 3.3 (prefix transfer), TokenLake 4. Tests: tests/unit/policy/test_prefix_source.py.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.core.types import WorkerLoad
from kvmesh.policy.holders import Lower

T = TypeVar("T")

ASK_CHUNK_TOKENS = 512
"""New tokens that ask together; a step's default budget."""

MIN_FETCH_TOKENS = 128
"""Less than this is computed in about the time in which it is asked for."""

INSIDE_SHARE = 0.05
"""Before anything is measured: KV of a token travels within a cluster in this part of the time in
which it is computed."""

BETWEEN_SHARE = 0.5
"""As `INSIDE_SHARE`, from one cluster to another."""

HOST_SHARE = 0.05
"""Before anything is measured: a token's KV comes up from host memory in this part of the time in
which it is computed; accelerators compute fast, and their hosts are behind a narrow bus."""

DISK_SHARE = 0.25
"""As `HOST_SHARE`, from disk."""

OVERHEAD_S = 0.005
"""Lease, first read and last answer, whatever the length."""

OVERHEAD_TOKENS = 64.0
"""As `OVERHEAD_S`, before it is known how long a token takes."""

WORTH = 0.8
"""A fetch that saves less than a fifth is left alone: the holder works for it, too."""


@dataclass(frozen=True, slots=True)
class FetchPace:
    """What was measured of a model's fleet; 0 is not known yet.

    Attributes:
        token_s: to compute a token of a prompt.
        inside_token_s: for the KV of a token to travel within a cluster.
        between_token_s: from one cluster to another.
        ask_chunk_s: for the questions of one chunk, in all layers, without their attention.
        ask_pair_s: of attention, for each new token and token of the prefix.
    """

    token_s: float = 0.0
    inside_token_s: float = 0.0
    between_token_s: float = 0.0
    ask_chunk_s: float = 0.0
    ask_pair_s: float = 0.0

    def share(self, *, inside: bool) -> float:
        """Cost of a token that is brought, in tokens that are computed."""
        travel_s = self.inside_token_s if inside else self.between_token_s
        if not self.token_s or not travel_s:
            return INSIDE_SHARE if inside else BETWEEN_SHARE
        return travel_s / self.token_s

    @property
    def overhead_tokens(self) -> float:
        """Cost of any fetch, in tokens that are computed."""
        return OVERHEAD_S / self.token_s if self.token_s else OVERHEAD_TOKENS

    def load_tokens(self, lower: Lower, block_size: int, load: WorkerLoad) -> float:
        """Cost of bringing up what a worker holds below its pool, in tokens that are computed.

        Args:
            load: says what the worker has measured of its tiers.
        """
        host = self._up_tokens(lower.host * block_size, load.host_token_s, HOST_SHARE)
        return host + self._up_tokens(lower.disk * block_size, load.disk_token_s, DISK_SHARE)

    def _up_tokens(self, num_tokens: int, up_token_s: float, share: float) -> float:
        if self.token_s and up_token_s:
            share = up_token_s / self.token_s
        return num_tokens * share

    def ask_tokens(self, num_new: int, num_remote: int) -> float | None:
        """Cost of asking about a prefix, in tokens that are computed; None while not known."""
        if not self.token_s or not self.ask_chunk_s:
            return None
        num_chunks = -(-num_new // ASK_CHUNK_TOKENS)
        seconds = num_chunks * self.ask_chunk_s + num_new * num_remote * self.ask_pair_s
        return seconds / self.token_s


class Way(enum.Enum):
    """What becomes of a prefix that is not in the pool."""

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
    """The cheapest way, and its cost in the unit of the arguments.

    Computing goes before loading, that before fetching, and that before asking, where they cost
    the same.

    Args:
        fetch, ask, load: None where that cannot be, or is not known.
        worth: another worker is troubled only for less than this share of what it costs without.
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
    """Tokens by which the first one comes sooner through a fetch; 0 if it is not worth it.

    Args:
        num_missing: that one worker lacks and another one holds; at least `MIN_FETCH_TOKENS`.
        queued_tokens: whose KV has to leave the holder before.
        overhead_tokens, share: of the `FetchPace`; one route weighs many workers with them.
    """
    cost = overhead_tokens + (num_missing + queued_tokens) * share
    return num_missing - cost if cost <= WORTH * num_missing else 0.0


def choose_holder(
    holders: Sequence[T], load: Callable[[T], tuple[float, ...]], rng: random.Random
) -> T:
    """Whom to read from: of two at random, the less loaded one."""
    two = rng.sample(holders, 2) if len(holders) > 2 else holders
    return min(two, key=load)
