"""Fetches among the workers that one route weighs: who holds most, and who brings it from there.

Tests: tests/unit/policy/test_fetch_route.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    What a worker holds below its pool makes it later, by what bringing that up costs; it is fetched
    instead, where another one has it here sooner.

    Args:
        standings: all of one layout; those that fetch are sooner afterwards.
        readable: of these, workers that answer.
        decoders: see there; None where who computes a prompt decodes it, and asks nobody.
    """
    longest = max([each.cached_tokens for each in readable], default=0)
    if not longest:
        return
    for each in {*standings, *readable}:
        if any(each.lower):
            _weigh_load(each, pace)
    size = standings[0].worker.info.layout.block_size
    # The last token of a prompt is always computed.
    usable = min(longest, (standings[0].query.num_tokens - 1) // size * size)
    holder: _Holder | None = None
    for each in standings:
        each.first_token += each.load_tokens
        missing = max(usable - each.cached_tokens, 0)
        if missing < MIN_FETCH_TOKENS and _lower_tokens(each) < MIN_FETCH_TOKENS:
            each.fetch = FetchReason.SHORT if missing else FetchReason.HELD
        else:
            if holder is None:  # most requests need none, and drawing one takes its time
                holders = _best_holders(readable, longest)
                holder = _Holder(choose_holder(holders, _load, rng), pace, decoders)
            holder.weigh_for(each, missing)


def _weigh_load(each: Standing, pace: FetchPace) -> None:
    """What it costs that a part of what a worker holds is below its pool."""
    size, load = each.worker.info.layout.block_size, each.worker.load
    cost = pace.load_tokens(each.lower, size, load)
    _, each.load_tokens = cheapest_way(_lower_tokens(each), None, None, cost)


def _lower_tokens(each: Standing) -> int:
    return sum(each.lower) * each.worker.info.layout.block_size


def _best_holders(readable: Sequence[Standing], longest: int) -> list[Standing]:
    """Those that hold most, and of these who has least to bring up."""
    holders = [each for each in readable if each.cached_tokens == longest]
    least = min(each.load_tokens for each in holders)
    return [each for each in holders if each.load_tokens == least]


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
        self._overhead = pace.overhead_tokens + standing.load_tokens
        self._inside = pace.share(inside=True)
        self._between = pace.share(inside=False)
        # What a decode worker holds stays there, if the prompt comes to be decoded there.
        asked = pace.ask_chunk_s and decoders is not None and decoders.is_first(standing)
        self._ask = pace.ask_tokens if asked else None

    def weigh_for(self, each: Standing, missing: int) -> None:
        """Lets a worker fetch `missing` tokens, what it has below its pool as well, or nothing."""
        inside = each.worker.info.cluster == self._cluster
        share = self._inside if inside else self._between
        source, saved, asks = self._rest(each, missing, inside, share)
        whole = self._whole(each, missing, share)
        if whole > saved:
            source, saved, asks = replace(self._source, before_load=True), whole, False
        if not saved:
            loads = missing < MIN_FETCH_TOKENS
            each.fetch = FetchReason.LOAD if loads else FetchReason.SLOW
            return
        each.fetch = FetchReason.ASK if asks else FetchReason.FETCH
        # Who asks needs no more than its reservation. If another worker comes to decode, what it
        # would ask for is brought, where that pays.
        each.source = source
        each.saved_tokens = saved
        each.first_token -= saved

    def _rest(
        self, each: Standing, missing: int, inside: bool, share: float
    ) -> tuple[PrefixSource | None, float, bool]:
        """Of what a worker does not hold: whom it fetches from, what that saves, and if it asks."""
        if missing < MIN_FETCH_TOKENS:
            return None, 0.0, False
        saved = saved_tokens(missing, self._queued, self._overhead, share)
        source, asks = self._source if saved > 0 else None, False
        # A prompt is decoded beside the worker that computes it, where there is room.
        if self._ask is not None and inside and each.worker.info.role is not Role.DECODE:
            asked = self._ask(each.uncached_tokens - missing, missing)
            fetched = None if source is None else missing - saved
            way, cost = cheapest_way(missing, fetched, asked, worth=WORTH)
            saved, asks = missing - cost, way is Way.ASK
        return source, saved, asks

    def _whole(self, each: Standing, missing: int, share: float) -> float:
        """What is saved by fetching what a worker has below its pool, too; 0: nothing."""
        lower = _lower_tokens(each)
        if not lower or each.worker.info.worker_id == self._source.worker_id:
            return 0.0
        alone = each.load_tokens + missing
        fetched = self._overhead + (missing + lower + self._queued) * share
        _, cost = cheapest_way(missing + lower, fetched, None, alone, worth=WORTH)
        return alone - cost


def fetch_words(standing: Standing) -> str:
    """What a route's sentence adds for a worker that fetches, or brings up what it holds below."""
    if standing.fetch is FetchReason.ASK:
        return ", of which it asks the worker that decodes"
    source, size = standing.source, standing.worker.info.layout.block_size
    if source is not None:
        num_tokens = source.num_blocks * size
        return f", of which it fetches up to {num_tokens} from {source.worker_id}"
    if standing.fetch is FetchReason.LOAD:
        return f", and brings up {_lower_tokens(standing)} of the cached ones from its tiers"
    return ""


def _load(standing: Standing) -> tuple[float, float]:
    """What speaks against reading from a holder: what waits to leave it, then what was read."""
    return _queued_tokens(standing), standing.reads


def _queued_tokens(standing: Standing) -> float:
    """Tokens whose KV has to leave a worker before what it is asked for now."""
    layout = standing.worker.info.layout
    return standing.worker.load.sending_bytes * layout.block_size / layout.block_bytes
