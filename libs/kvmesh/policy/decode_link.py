"""Prefers decode workers to which KV travels fast from the chosen prefill worker.

FlowKV's normal state takes the decode worker with the least transfer latency (Algorithm 1). The
size of a decode batch counts for the whole life of a request and its transfer only once, so here
the link decides among workers that are about equally loaded.
Tests: tests/unit/policy/test_decode_link.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvmesh.core.types import WorkerId
from kvmesh.policy.ranking import RankFunction
from kvmesh.policy.seats import Seat

Links = Mapping[tuple[WorkerId, WorkerId], float]
"""Measured seconds to move a token's KV, by sender and receiver."""

LOAD_SLACK = 0.1
"""Difference of the decode rank's cost up to which two workers are about equally loaded."""

NOTICED_S = 0.002
"""Difference between two transfers, in seconds, that is ignored."""


def by_transfer(
    decode: Sequence[Seat], prefill: Seat, links: Links, rank: RankFunction
) -> list[Seat]:
    """Returns the decode candidates, of the best ones those with a fast link first.

    A link counts as slower from twice the time on, because measurements vary. A link that was not
    measured counts as the fastest one, so that it is tried.

    Args:
        decode: in the order of their rank.
        prefill: the worker that sends.
        rank: returns whether a worker is full, and its cost.
    """
    sender = prefill.worker.info.worker_id
    near = _about_equal(decode, rank)
    if len(near) < 2:
        return list(decode)
    known = [links.get((sender, seat.worker.info.worker_id)) for seat in near]
    fastest_s = min((each for each in known if each is not None), default=0.0)
    if not fastest_s:
        return list(decode)
    times_s = [
        seat.uncached_tokens * (fastest_s if token_s is None else token_s)
        for seat, token_s in zip(near, known, strict=True)
    ]
    least_s = min(times_s)

    def slowness(index: int) -> int:
        if times_s[index] < least_s + NOTICED_S:
            return 0
        return int(math.log2(times_s[index] / least_s))

    order = sorted(range(len(near)), key=slowness)
    return [*(near[index] for index in order), *decode[len(near) :]]


def _about_equal(decode: Sequence[Seat], rank: RankFunction) -> list[Seat]:
    """Returns the leading candidates that are about as good as the first one."""
    first = decode[0]
    is_full, best = rank(first)
    if is_full or first.avoided or first.silent:
        return []
    near = []
    for seat in decode:
        full, cost = rank(seat)
        is_other = full or seat.avoided or seat.silent or seat.group != first.group
        if is_other or cost > best + LOAD_SLACK:
            break
        near.append(seat)
    return near
