"""Finds the workers that hold leading blocks of a prompt.

It uses the scheduler's own index. Until that is filled, it asks the kvmanager.
Tests: tests/unit/scheduler/test_knowledge.py, tests/unit/scheduler/test_router.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import BlockHash, RouteQuery, WorkerId
from kvmesh.policy.holders import NOTHING_LOWER, HeldBlocks, lower_of
from services.scheduler import metrics
from services.scheduler.fleet import Fleet


class Lookup(enum.Enum):
    """How a route learned which workers hold a prefix, or why it did not."""

    NOTHING = "nothing"
    """There was nothing to look up: no full block, or no worker that publishes its blocks."""
    INDEX = "index"
    ASKED = "asked"
    """The kvmanager answered; the index is not filled yet or was cut off."""
    LATE = "late"
    """The kvmanager did not answer within the limit."""
    DEGRADED = "degraded"
    """The kvmanager could not ask its store."""
    AWAY = "away"
    """The kvmanager cannot be reached."""
    OFF = "off"
    """There is no kvmanager."""


@dataclass(frozen=True, slots=True)
class Known:
    """The result of a lookup.

    Attributes:
        matches: number of leading blocks by worker; None if it could not be found out.
    """

    matches: Mapping[WorkerId, int] | None
    how: Lookup


class Matches(Protocol):
    """Answer of a `PrefixMatcher`."""

    @property
    def matches(self) -> Sequence[PrefixMatch]:
        """The workers that hold leading blocks."""
        ...

    @property
    def known(self) -> bool:
        """False if the store could not be asked."""
        ...

    @property
    def why(self) -> str:
        """The reason if `known` is False: `late`, `degraded` or `away`."""
        ...


class PrefixMatcher(Protocol):
    """Asks the kvmanager for prefix matches: `kvmesh.rpc.prefix_lookup.PrefixLookup`."""

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Matches:
        """Leading blocks held by each worker; `known` is False after `timeout_s`."""
        ...


class PrefixIndex(Protocol):
    """Finds prefix matches without waiting: `kvmesh.rpc.prefix_feed.PrefixFeed`."""

    @property
    def known(self) -> bool:
        """Whether it is filled and up to date."""
        ...

    def match(self, namespace: str, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        """Leading blocks held by each worker."""
        ...


class PrefixKnowledge:
    """Looks up prefixes, and counts each way of finding them.

    Args:
        asked: asks the kvmanager; None routes without cache knowledge while there is no index.
        timeout_s: longest wait for an answer.
    """

    def __init__(
        self,
        fleet: Fleet,
        asked: PrefixMatcher | None,
        index: PrefixIndex | None,
        timeout_s: float,
    ) -> None:
        self._fleet = fleet
        self._asked = asked
        self._index = index
        self._timeout_s = timeout_s
        self._counts = {how: metrics.PREFIX_LOOKUPS.labels(how.value) for how in Lookup}

    async def of(self, query: RouteQuery) -> Known:
        """Looks up the query's prompt."""
        known = await self._found(query)
        self._counts[known.how].inc()
        return known

    async def _found(self, query: RouteQuery) -> Known:
        if not query.block_hashes:
            return Known({}, Lookup.NOTHING)  # no block of it can be cached, and that is certain
        if self._asked is None:
            return Known(None, Lookup.OFF)
        # One namespace, except while a model's checkpoint is being replaced.
        served = self._fleet.fingerprints(query.model)
        spaces = sorted(served & {query.fingerprint} if query.fingerprint else served)
        if not spaces:
            return Known({}, Lookup.NOTHING)
        index = self._index
        if index is not None and index.known:
            found = [index.match(each, query.block_hashes) for each in spaces]
            return Known(found[0] if len(found) == 1 else _longest(found), Lookup.INDEX)
        return await self._ask(self._asked, spaces, query)

    async def _ask(self, asked: PrefixMatcher, spaces: Sequence[str], query: RouteQuery) -> Known:
        matches: list[PrefixMatch] = []
        for each in spaces:
            answer = await asked.match(each, query.block_hashes, self._timeout_s)
            if not answer.known:
                return Known(None, Lookup(answer.why))
            matches.extend(answer.matches)
        return Known(self._fleet.current_matches(matches), Lookup.ASKED)


def _longest(found: Sequence[Mapping[WorkerId, int]]) -> HeldBlocks:
    merged = HeldBlocks()
    for each in found:
        names = list(each)
        lower = lower_of(each, names) or [NOTHING_LOWER] * len(names)
        for worker_id, below in zip(names, lower, strict=True):
            merged.take(worker_id, each[worker_id], below)
    return merged
