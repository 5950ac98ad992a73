"""What happened to a worker's cached blocks, in order and with their tokens, for outside indexers.

Unlike `BlockPool.take_events`, which nets changes out for the kvmanager, this keeps the order and
what each block holds. Pure bookkeeping. Tests: tests/unit/kv/test_events.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that follow each other in one sequence can be matched from now on.

    Attributes:
        parent: hash of the block before the first one; None at the start of a sequence.
        token_ids: of all the blocks, in order.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks can be matched no longer."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached: the worker has just started."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


class KvEventLog:
    """Collects events until somebody takes them.

    Memory is bounded by what is taken: whoever makes a log takes from it often.

    Args:
        is_cached: whether a block can be matched; one that is full need not be kept.
    """

    def __init__(self, block_size: int, is_cached: Callable[[BlockHash], bool]) -> None:
        self._block_size = block_size
        self._is_cached = is_cached
        self._held: set[BlockHash] = set()
        self._events: list[KvEvent] = [AllCleared()]
        self._removed: list[BlockHash] = []

    def __len__(self) -> int:
        return len(self._events) + bool(self._removed)

    def stored(self, hashes: Sequence[BlockHash], token_ids: Sequence[int], first: int) -> None:
        """Blocks of one sequence became full.

        Args:
            hashes: of all its full blocks, from the first one of the sequence.
            token_ids: all its tokens.
            first: index of the first block that is new; blocks that are held are left out.
        """
        run: list[int] = []
        for index in range(first, len(hashes)):
            if hashes[index] in self._held or not self._is_cached(hashes[index]):
                self._add_run(run, hashes, token_ids)
                run = []
            else:
                run.append(index)
        self._add_run(run, hashes, token_ids)

    def removed(self, block_hash: BlockHash) -> None:
        """A block was evicted; nothing happens if it was never told of."""
        if block_hash in self._held:
            self._held.discard(block_hash)
            self._removed.append(block_hash)

    def take(self) -> list[KvEvent]:
        """Returns and forgets the events so far, oldest first."""
        self._settle_removed()
        events, self._events = self._events, []
        return events

    def _add_run(
        self, run: list[int], hashes: Sequence[BlockHash], token_ids: Sequence[int]
    ) -> None:
        if not run:
            return
        self._settle_removed()
        start, end = run[0], run[-1] + 1
        parent = hashes[start - 1] if start else None
        tokens = tuple(token_ids[start * self._block_size : end * self._block_size])
        new = tuple(hashes[start:end])
        self._held.update(new)
        self._events.append(BlocksStored(new, parent, tokens))

    def _settle_removed(self) -> None:
        """Removals that nothing came between are one event."""
        if self._removed:
            self._events.append(BlocksRemoved(tuple(self._removed)))
            self._removed.clear()
