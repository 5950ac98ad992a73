"""Decides for each candidate of a route whether it fetches the cached prefix, and from whom.

Tests: tests/unit/policy/test_fetch_route.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import PrefixSource, Role
from kvmesh.policy.holders import NOTHING_LOWER
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
    """Predicts which worker decodes the prompt. Only there may a prefix stay and be queried.

    Attributes:
        standings: standings of the candidates that are tried first for decode.
        rank: decode rank of the policy; the smallest of a cluster is tried first.
    """

    standings: Sequence[Standing]
    rank: RankFunction

    def is_first(self, standing: Standing) -> bool:
        """Whether this worker is its cluster's first choice to decode the prompt."""
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
    """Lets each worker fetch the part of the prompt that it lacks, where that is sooner.

    Blocks that a worker holds below its pool delay its first token by the cost of bringing them up.
    The worker fetches them instead where another worker delivers them sooner.

    Args:
        standings: all of one layout; `first_token` falls for those that fetch.
        readable: the standings whose workers can be read from now.
        decoders: prediction of the decode worker. None where prefill and decode run on one worker:
            then no prefix is queried remotely.
    """
    longest = max([each.cached_tokens for each in readable], default=0)
    if not longest:
        return
    for each in (*standings, *readable):
        if each.lower is not NOTHING_LOWER and any(each.lower):
            _weigh_load(each, pace)
    size = standings[0].worker.info.layout.block_size
    # The last token of a prompt is always computed.
    usable = min(longest, (standings[0].query.num_tokens - 1) // size * size)
    holder: _Holder | None = None
    for each in standings:
        each.first_token += each.load_tokens
        missing = max(usable - each.cached_tokens, 0)
        lower = 0 if each.lower is NOTHING_LOWER else _lower_tokens(each)
        if missing < MIN_FETCH_TOKENS and lower < MIN_FETCH_TOKENS:
            each.fetch = FetchReason.SHORT if missing else FetchReason.HELD
        else:
            if holder is None:  # most requests need none, and drawing one takes its time
                holders = _best_holders(readable, longest)
                holder = _Holder(choose_holder(holders, _load, rng), pace, decoders)
            holder.weigh_for(each, missing, lower)


def _weigh_load(each: Standing, pace: FetchPace) -> None:
    """Sets `load_tokens`: the cost of bringing up the cached blocks that lie below the pool."""
    size, load = each.worker.info.layout.block_size, each.worker.load
    cost = pace.load_tokens(each.lower, size, load)
    _, each.load_tokens = cheapest_way(_lower_tokens(each), None, None, cost)


def _lower_tokens(each: Standing) -> int:
    return sum(each.lower) * each.worker.info.layout.block_size


def _best_holders(readable: Sequence[Standing], longest: int) -> list[Standing]:
    """Returns the holders of the longest prefix that have the least to bring up."""
    holders = [each for each in readable if each.cached_tokens == longest]
    least = min([each.load_tokens for each in holders])
    return [each for each in holders if each.load_tokens == least]


class _Holder:
    """The one holder that all workers of a route fetch from, with the costs that they share."""

    __slots__ = ("_ask", "_cluster", "_inside", "_overhead", "_pace", "_queued", "_source")

    def __init__(self, standing: Standing, pace: FetchPace, decoders: Decoders | None) -> None:
        info = standing.worker.info
        num_blocks = standing.cached_tokens // info.layout.block_size
        self._source = PrefixSource(
            info.worker_id, info.incarnation, info.control_endpoint, num_blocks
        )
        self._cluster = info.cluster
        self._queued = _queued_tokens(standing)
        self._overhead = pace.overhead_tokens + standing.load_tokens
        self._pace = pace
        self._inside = pace.inside_share
        # A decode worker's prefix may stay there if that worker is to decode the prompt.
        asked = pace.ask_chunk_s and decoders is not None and decoders.is_first(standing)
        self._ask = pace.ask_tokens if asked else None

    def weigh_for(self, each: Standing, missing: int, lower: int) -> None:
        """Lets a worker fetch its `missing` tokens, also the `lower` ones in its tiers, or none."""
        reader = each.worker.info.cluster
        inside = reader == self._cluster
        share = self._inside if inside else self._pace.share(self._cluster, reader)
        source, saved, asks = self._rest(each, missing, inside, share)
        whole = self._whole(each, missing, lower, share) if lower else 0.0
        if whole > saved:
            source, saved, asks = replace(self._source, before_load=True), whole, False
        if not saved:
            loads = missing < MIN_FETCH_TOKENS
            each.fetch = FetchReason.LOAD if loads else FetchReason.SLOW
            return
        each.fetch = FetchReason.ASK if asks else FetchReason.FETCH
        # A remote query needs no source beside the reservation. It is kept for the case that
        # another worker decodes: the prefix is then fetched, where that pays.
        each.source = source
        each.saved_tokens = saved
        each.first_token -= saved

    def _rest(
        self, each: Standing, missing: int, inside: bool, share: float
    ) -> tuple[PrefixSource | None, float, bool]:
        """Decides on the tokens that a worker lacks.

        Returns:
            The source to fetch from, the tokens saved, and whether it queries remotely instead.
        """
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

    def _whole(self, each: Standing, missing: int, lower: int, share: float) -> float:
        """Returns the tokens saved by fetching also those below the worker's pool; 0: none."""
        if each.worker.info.worker_id == self._source.worker_id:
            return 0.0
        alone = each.load_tokens + missing
        fetched = self._overhead + (missing + lower + self._queued) * share
        _, cost = cheapest_way(missing + lower, fetched, None, alone, worth=WORTH)
        return alone - cost


def fetch_words(standing: Standing) -> str:
    """Returns the clause of a route's reason about fetching, querying or bringing up blocks."""
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
    """Returns a holder's load as a sort key: tokens queued to leave it, then recent reads."""
    return _queued_tokens(standing), standing.reads


def _queued_tokens(standing: Standing) -> float:
    """Returns the tokens whose KV the worker has queued for sending ahead of a new fetch."""
    layout = standing.worker.info.layout
    return standing.worker.load.sending_bytes * layout.block_size / layout.block_bytes
