"""Fetches among the workers that one route weighs: who holds most, and who brings it from there.

Tests: tests/unit/policy/test_fetch_route.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import PrefixSource, Role
from kvmesh.policy.prefix_source import (
    MIN_FETCH_TOKENS,
    WORTH,
    FetchPace,
    Way,
    cheapest_way,
    choose_holder,
    saved_tokens,
)
from kvmesh.policy.ranking import RankFunction, Standing


@dataclass(frozen=True, slots=True)
class Decoders:
    """Says where a prompt that is computed elsewhere is decoded: only there it can be asked about.

    Attributes:
        standings: of all that may be tried to decode it before others.
        rank: of the policy; the smallest of a cluster is tried first.
    """

    standings: Sequence[Standing]
    rank: RankFunction

    def is_first(self, standing: Standing) -> bool:
        """Whether a prompt of its cluster comes to it."""
        if standing.decode_full or standing not in self.standings:
            return False
        cluster = standing.worker.info.cluster
        beside = [each for each in self.standings if each.worker.info.cluster == cluster]
        return self.rank(standing) <= min(map(self.rank, beside))


def weigh_fetches(
    standings: Sequence[Standing],
    readable: Sequence[Standing],
    pace: FetchPace,
    rng: random.Random,
    decoders: Decoders | None = None,
) -> None:
    """Lets workers that hold less of the prompt than others bring the rest, where that is sooner.

    Args:
        standings: all of one layout; those that fetch are sooner afterwards.
        readable: of these, workers that answer.
        decoders: see there; None where who computes a prompt decodes it, and asks nobody.
    """
    longest = max([each.cached_tokens for each in readable], default=0)
    if not longest:
        return
    size = standings[0].worker.info.layout.block_size
    # The last token of a prompt is always computed.
    usable = min(longest, (standings[0].query.num_tokens - 1) // size * size)
    holder: _Holder | None = None
    for each in standings:
        missing = usable - each.cached_tokens
        if missing <= 0:
            each.fetch = FetchReason.HELD
        elif missing < MIN_FETCH_TOKENS:
            each.fetch = FetchReason.SHORT
        else:
            if holder is None:  # most requests need none, and drawing one takes its time
                holders = [one for one in readable if one.cached_tokens == longest]
                holder = _Holder(choose_holder(holders, _load, rng), pace, decoders)
            holder.weigh_for(each, missing)


class _Holder:
    """Whom all workers of a route fetch from, with what is the same for all of them."""

    __slots__ = ("_ask", "_between", "_cluster", "_inside", "_overhead", "_queued", "_source")

    def __init__(self, standing: Standing, pace: FetchPace, decoders: Decoders | None) -> None:
        info = standing.worker.info
        num_blocks = standing.cached_tokens // info.layout.block_size
        self._source = PrefixSource(
            info.worker_id, info.incarnation, info.control_endpoint, num_blocks
        )
        self._cluster = info.cluster
        self._queued = _queued_tokens(standing)
        self._overhead = pace.overhead_tokens
        self._inside = pace.share(inside=True)
        self._between = pace.share(inside=False)
        # What a decode worker holds stays there, if the prompt comes to be decoded there.
        asked = pace.ask_chunk_s and decoders is not None and decoders.is_first(standing)
        self._ask = pace.ask_tokens if asked else None

    def weigh_for(self, each: Standing, missing: int) -> None:
        """Lets a worker fetch `missing` tokens, or not."""
        info = each.worker.info
        inside = info.cluster == self._cluster
        share = self._inside if inside else self._between
        saved = saved_tokens(missing, self._queued, self._overhead, share)
        fetches, asks = saved > 0, False
        # A prompt is decoded beside the worker that computes it, where there is room.
        if self._ask is not None and inside and info.role is not Role.DECODE:
            asked = self._ask(each.uncached_tokens - missing, missing)
            fetched = missing - saved if fetches else None
            way, cost = cheapest_way(missing, fetched, asked, worth=WORTH)
            saved, asks = missing - cost, way is Way.ASK
        if not saved:
            each.fetch = FetchReason.SLOW
            return
        each.fetch = FetchReason.ASK if asks else FetchReason.FETCH
        # Who asks needs no more than its reservation. If another worker comes to decode, what it
        # would ask for is brought, where that pays.
        each.source = self._source if fetches else None
        each.saved_tokens = saved
        each.first_token -= saved


def fetch_words(standing: Standing) -> str:
    """What a route's sentence adds for a worker that fetches."""
    if standing.fetch is FetchReason.ASK:
        return ", of which it asks the worker that decodes"
    source = standing.source
    if source is None:
        return ""
    num_tokens = source.num_blocks * standing.worker.info.layout.block_size
    return f", of which it fetches up to {num_tokens} from {source.worker_id}"


def _load(standing: Standing) -> tuple[float, float]:
    """What speaks against reading from a holder: what waits to leave it, then what was read."""
    return _queued_tokens(standing), standing.reads


def _queued_tokens(standing: Standing) -> float:
    """Tokens whose KV has to leave a worker before what it is asked for now."""
    layout = standing.worker.info.layout
    return standing.worker.load.sending_bytes * layout.block_size / layout.block_bytes
