"""Fetches among the workers that one route weighs: who holds most, and who brings it from there.

Tests: tests/unit/policy/test_fetch_route.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvmesh.core.types import FetchReason, PrefixSource
from kvmesh.policy.prefix_source import (
    MIN_FETCH_TOKENS,
    FetchPace,
    choose_holder,
    decide_fetch,
)
from kvmesh.policy.ranking import Standing


def weigh_fetches(
    standings: Sequence[Standing],
    readable: Sequence[Standing],
    pace: FetchPace,
    rng: random.Random,
) -> None:
    """Lets workers that hold less of the prompt than others bring the rest, where that is sooner.

    Args:
        standings: all of one layout; those that fetch are sooner afterwards.
        readable: of these, workers that answer.
    """
    longest = max((each.cached_tokens for each in readable), default=0)
    if not longest:
        return
    size = standings[0].worker.info.layout.block_size
    # The last token of a prompt is always computed.
    usable = min(longest, (standings[0].query.num_tokens - 1) // size * size)
    holder: Standing | None = None
    for each in standings:
        missing = usable - each.cached_tokens
        if missing <= 0:
            each.fetch = FetchReason.HELD
        elif missing < MIN_FETCH_TOKENS:
            each.fetch = FetchReason.SHORT
        else:
            if holder is None:  # most requests need none, and drawing one takes its time
                holders = [one for one in readable if one.cached_tokens == longest]
                holder = choose_holder(holders, _queued_tokens, rng)
            _weigh(each, holder, missing, pace)


def fetch_words(standing: Standing) -> str:
    """What a route's sentence adds for a worker that fetches."""
    source = standing.source
    if source is None:
        return ""
    num_tokens = source.num_blocks * standing.worker.info.layout.block_size
    return f", of which it fetches up to {num_tokens} from {source.worker_id}"


def _weigh(each: Standing, holder: Standing, missing: int, pace: FetchPace) -> None:
    info = holder.worker.info
    inside = each.worker.info.cluster == info.cluster
    choice = decide_fetch(missing, _queued_tokens(holder), pace, inside=inside)
    each.fetch = choice.reason
    if choice.reason is FetchReason.FETCH:
        num_blocks = holder.cached_tokens // info.layout.block_size
        each.source = PrefixSource(
            info.worker_id, info.incarnation, info.control_endpoint, num_blocks
        )
        each.saved_tokens = choice.saved_tokens
        each.first_token -= choice.saved_tokens


def _queued_tokens(standing: Standing) -> float:
    """Tokens whose KV has to leave a worker before what it is asked for now."""
    layout = standing.worker.info.layout
    return standing.worker.load.sending_bytes * layout.block_size / layout.block_bytes
