"""Whether a worker brings the start of a prompt from one that holds it, or computes it. Pure.

Both are counted in the unit of `ranking.Standing.first_token`, tokens computed until the first
one: a token that is brought costs the part of a token in which its KV travels. Of several holders
of as much, the less loaded of two at random is read (TokenLake 4.3).
Source: PrfaaS 3.3 (prefix transfer), TokenLake 4. Tests: tests/unit/policy/test_prefix_source.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.core.types import FetchReason

T = TypeVar("T")

MIN_FETCH_TOKENS = 128
"""Less than this is computed in about the time in which it is asked for."""

INSIDE_SHARE = 0.05
"""Before anything is measured: KV of a token travels within a cluster in this part of the time in
which it is computed."""

BETWEEN_SHARE = 0.5
"""As `INSIDE_SHARE`, from one cluster to another."""

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
    """

    token_s: float = 0.0
    inside_token_s: float = 0.0
    between_token_s: float = 0.0

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


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """A decision.

    Attributes:
        saved_tokens: by which the first token comes sooner than if all were computed; 0 when
            nothing is fetched.
    """

    reason: FetchReason
    saved_tokens: float = 0.0


def decide_fetch(
    num_missing: int, queued_tokens: float, pace: FetchPace, *, inside: bool
) -> FetchChoice:
    """Fetch or compute what one worker lacks and another one holds.

    Args:
        num_missing: tokens, of those that could be taken from a cache.
        queued_tokens: whose KV has to leave the holder before.
        inside: both are in one cluster.
    """
    if num_missing < MIN_FETCH_TOKENS:
        return FetchChoice(FetchReason.SHORT)
    share = pace.share(inside=inside)
    saved = saved_tokens(num_missing, queued_tokens, pace.overhead_tokens, share)
    return FetchChoice(FetchReason.FETCH, saved) if saved else FetchChoice(FetchReason.SLOW)


def saved_tokens(
    num_missing: int, queued_tokens: float, overhead_tokens: float, share: float
) -> float:
    """Tokens by which the first one comes sooner through a fetch; 0 if it is not worth it.

    Args:
        num_missing: at least `MIN_FETCH_TOKENS`.
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
