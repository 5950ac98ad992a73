"""What happened to a worker's cached blocks, in order and with their tokens, for outside indexers.

Unlike `BlockPool.take_events`, which nets changes out for the kvmanager, this keeps the order and
what each block holds. A block is told to be in one medium at a time, the fastest that has it.
Pure bookkeeping. Tests: tests/unit/kv/test_events.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvmesh.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks can be matched from now on; in the pool's medium they follow each other.

    Attributes:
        parent: hash of the block before the first one; None at the start of a sequence.
        token_ids: of all the blocks, in order; empty in a lower medium, which knows names alone.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are in a medium no longer."""

    hashes: tuple[BlockHash, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached: the worker has just started."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


class KvEventLog:
    """Collects events until somebody takes them.

    Memory is bounded by what is taken: whoever makes a log takes from it often.

    Args:
        is_cached: whether a block can be matched; one that is full need not be kept.
        medium: of the pool.
    """

    def __init__(
        self, block_size: int, is_cached: Callable[[BlockHash], bool], medium: str
    ) -> None:
        self._block_size = block_size
        self._is_cached = is_cached
        self._medium = medium
        self._held: dict[BlockHash, str] = {}
        self._events: list[KvEvent] = [AllCleared()]
        # Blocks that left a medium, for another one or None.
        self._left: list[tuple[BlockHash, str, str | None]] = []

    def __len__(self) -> int:
        return len(self._events) + bool(self._left)

    def stored(self, hashes: Sequence[BlockHash], token_ids: Sequence[int], first: int) -> None:
        """Blocks of one sequence became full.

        Args:
            hashes: of all its full blocks, from the first one of the sequence.
            token_ids: all its tokens.
            first: index of the first block that is new; blocks that are held are left out.
        """
        run: list[int] = []
        for index in range(first, len(hashes)):
            is_told = self._held.get(hashes[index]) == self._medium
            if is_told or not self._is_cached(hashes[index]):
                self._add_run(run, hashes, token_ids)
                run = []
            else:
                run.append(index)
        self._add_run(run, hashes, token_ids)

    def removed(self, block_hash: BlockHash) -> None:
        """A block is gone; nothing happens if it was never told of."""
        medium = self._held.pop(block_hash, None)
        if medium is not None:
            self._left.append((block_hash, medium, None))

    def lowered(self, block_hash: BlockHash, medium: str) -> None:
        """A block left the pool or a tier, and this is the fastest medium that has it now."""
        before = self._held.get(block_hash)
        if before not in (None, medium):
            self._held[block_hash] = medium
            self._left.append((block_hash, before, medium))

    def found(self, hashes: Sequence[BlockHash], medium: str) -> None:
        """Blocks that lie in a tier from the start."""
        self._held.update(dict.fromkeys(hashes, medium))
        if hashes:
            self._events.append(BlocksStored(tuple(hashes), None, (), medium))

    def take(self) -> list[KvEvent]:
        """Returns and forgets the events so far, oldest first."""
        self._settle_left()
        events, self._events = self._events, []
        return events

    def _add_run(
        self, run: list[int], hashes: Sequence[BlockHash], token_ids: Sequence[int]
    ) -> None:
        if not run:
            return
        self._settle_left()
        start, end = run[0], run[-1] + 1
        parent = hashes[start - 1] if start else None
        tokens = tuple(token_ids[start * self._block_size : end * self._block_size])
        new = tuple(hashes[start:end])
        self._events.append(BlocksStored(new, parent, tokens, self._medium))
        for each in new:
            below = self._held.get(each)
            self._held[each] = self._medium
            if below is not None:
                self._left.append((each, below, None))

    def _settle_left(self) -> None:
        """What left one medium for the same other one, with nothing in between, is told together:
        first where it is, then where it is no longer.
        """
        for (old, new), group in groupby(self._left, key=lambda each: each[1:]):
            hashes = tuple(each[0] for each in group)
            if new is not None:
                self._events.append(BlocksStored(hashes, None, (), new))
            self._events.append(BlocksRemoved(hashes, old))
        self._left.clear()
