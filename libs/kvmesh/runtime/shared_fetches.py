"""Fetches that are under way on one worker, so that nobody fetches what is already coming.

Requests for one hot prefix arrive together. The first one fetches it and the others wait for it,
each for its own time: one that gives up, or is cancelled, disturbs nobody. When the one that
fetches is cancelled, the next one goes on behind what has arrived.
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
    """One fetch under way.

    Attributes:
        source: whom it reads from.
        hashes: that it asked for.
        over: set when it is, whatever came of it.
        settled: the holder has said all that it has to say about these blocks: who waited need not
            ask it again.
        reason: of its refusal, in a word.
        is_wanted: a request waits for it.
    """

    source: PrefixSource
    hashes: frozenset[BlockHash]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    settled: bool = False
    reason: str = ""
    is_wanted: bool = False

    def answers_for(self, source: PrefixSource, missing: BlockHash) -> bool:
        """Whether asking `source` for a block that did not arrive would bring no other answer."""
        mine = self.source
        same = (mine.worker_id, mine.incarnation) == (source.worker_id, source.incarnation)
        return self.settled and same and missing in self.hashes


class SharedFetches:
    """The fetches of one worker by the blocks that they bring. One event loop."""

    def __init__(self) -> None:
        self._flights: dict[BlockHash, Flight] = {}

    def bringing(self, block_hash: BlockHash) -> Flight | None:
        """The fetch that a block is expected from."""
        return self._flights.get(block_hash)

    @contextlib.contextmanager
    def flight(self, source: PrefixSource, hashes: Sequence[BlockHash]) -> Iterator[Flight]:
        """A fetch of blocks, from here to the end of the block.

        The first of them is brought by no other; of the rest, some may be.
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
        """Whether nothing is under way."""
        return not self._flights
