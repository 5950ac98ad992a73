"""The fetches in progress on one worker, so that no block is fetched twice at the same time.

Requests for one hot prefix arrive together. The first one fetches it and the others wait, each for
its own time. A waiting request that gives up or is cancelled disturbs no other. If the fetching
request is cancelled, the next one continues behind the blocks that have arrived.
Tests: tests/unit/runtime/test_shared_fetches.py, tests/integration/test_shared_fetch.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmesh.core.types import BlockHash, PrefixSource


@dataclass(slots=True, eq=False)
class Flight:
    """One fetch in progress.

    Attributes:
        source: the worker from which it reads.
        hashes: the blocks that it asked for.
        over: set at its end, whatever the result.
        settled: the holder gave a final answer on these blocks, so waiting requests need not ask it
            again.
        reason: the reason of the holder's refusal, one word.
        is_wanted: a request waits for it.
    """

    source: PrefixSource
    hashes: frozenset[BlockHash]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    settled: bool = False
    reason: str = ""
    is_wanted: bool = False

    def answers_for(self, source: PrefixSource, missing: BlockHash) -> bool:
        """Whether `source` would answer the same again about a block that did not arrive."""
        mine = self.source
        same = (mine.worker_id, mine.incarnation) == (source.worker_id, source.incarnation)
        return self.settled and same and missing in self.hashes


class SharedFetches:
    """The fetches of one worker by the blocks that they bring. One event loop."""

    def __init__(self) -> None:
        self._flights: dict[BlockHash, Flight] = {}

    def bringing(self, block_hash: BlockHash) -> Flight | None:
        """The fetch that is to bring a block; None if there is none."""
        return self._flights.get(block_hash)

    @contextlib.contextmanager
    def flight(self, source: PrefixSource, hashes: Sequence[BlockHash]) -> Iterator[Flight]:
        """Registers a fetch of blocks for the duration of the `with` block.

        No other fetch brings its first block. Other fetches may bring some of the rest.
        """
        assert hashes[0] not in self._flights, "somebody is fetching it"
        flight = Flight(source, frozenset(hashes))
        mine = [each for each in hashes if each not in self._flights]
        self._flights.update(dict.fromkeys(mine, flight))
        try:
            yield flight
        finally:
            for block_hash in mine:
                del self._flights[block_hash]
            flight.over.set()

    @property
    def is_idle(self) -> bool:
        """Whether no fetch is in progress."""
        return not self._flights
