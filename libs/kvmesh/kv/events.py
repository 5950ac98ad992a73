"""A log of events of a worker's cached blocks, in order and with tokens, for outside indexers.

Unlike `BlockPool.take_events`, which nets changes out for the kvmanager, this log keeps the order
and each block's tokens. A block is reported in one medium at a time, the fastest that has it.
Pure bookkeeping. Tests: tests/unit/kv/test_events.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvmesh.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks can be matched from now on; in the pool's medium they are consecutive in a sequence.

    Attributes:
        parent: hash of the block before the first one; None at the start of a sequence.
        token_ids: tokens of all the blocks, in order; empty in a lower medium, which has no tokens.
        adapter: LoRA adapter that they were computed with; empty: none, or a lower medium.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    medium: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer in a medium."""

    hashes: tuple[BlockHash, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached: the worker has just started."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


class KvEventLog:
    """Collects events until `take`.

    The log grows until its events are taken: its owner must call `take` often.

    Args:
        is_cached: whether a block can be matched; a full block need not be cached.
        medium: name of the pool's medium.
    """

    def __init__(
        self, block_size: int, is_cached: Callable[[BlockHash], bool], medium: str
    ) -> None:
        self._block_size = block_size
        self._is_cached = is_cached
        self._medium = medium
        self._held: dict[BlockHash, str] = {}
        self._events: list[KvEvent] = [AllCleared()]
        # Blocks that left a medium: hash, old medium, new medium or None.
        self._left: list[tuple[BlockHash, str, str | None]] = []

    def __len__(self) -> int:
        return len(self._events) + bool(self._left)

    def stored(
        self,
        hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        first: int,
        adapter: str = "",
    ) -> None:
        """Records that blocks of one sequence became full.

        Args:
            hashes: hashes of all its full blocks, from the first one of the sequence.
            token_ids: all its tokens.
            first: index of the first new block; blocks that were reported already are left out.
            adapter: the sequence's LoRA adapter; empty for none.
        """
        run: list[int] = []
        for index in range(first, len(hashes)):
            is_told = self._held.get(hashes[index]) == self._medium
            if is_told or not self._is_cached(hashes[index]):
                self._add_run(run, hashes, token_ids, adapter)
                run = []
            else:
                run.append(index)
        self._add_run(run, hashes, token_ids, adapter)

    def removed(self, block_hash: BlockHash) -> None:
        """Records that a block is gone; does nothing if it was never reported."""
        medium = self._held.pop(block_hash, None)
        if medium is not None:
            self._left.append((block_hash, medium, None))

    def lowered(self, block_hash: BlockHash, medium: str) -> None:
        """Records that a block left the pool or a tier, with the fastest medium that has it now."""
        before = self._held.get(block_hash)
        if before not in (None, medium):
            self._held[block_hash] = medium
            self._left.append((block_hash, before, medium))

    def found(self, hashes: Sequence[BlockHash], medium: str) -> None:
        """Records blocks that lie in a tier at the start."""
        self._held.update(dict.fromkeys(hashes, medium))
        if hashes:
            self._events.append(BlocksStored(tuple(hashes), None, (), medium))

    def take(self) -> list[KvEvent]:
        """Returns and forgets the events so far, oldest first."""
        self._settle_left()
        events, self._events = self._events, []
        return events

    def _add_run(
        self,
        run: list[int],
        hashes: Sequence[BlockHash],
        token_ids: Sequence[int],
        adapter: str,
    ) -> None:
        if not run:
            return
        self._settle_left()
        start, end = run[0], run[-1] + 1
        parent = hashes[start - 1] if start else None
        tokens = tuple(token_ids[start * self._block_size : end * self._block_size])
        new = tuple(hashes[start:end])
        self._events.append(BlocksStored(new, parent, tokens, self._medium, adapter))
        for each in new:
            below = self._held.get(each)
            self._held[each] = self._medium
            if below is not None:
                self._left.append((each, below, None))

    def _settle_left(self) -> None:
        """Turns moves into events: consecutive moves between the same two media share one pair.

        The new medium is reported before the removal from the old one.
        """
        for (old, new), group in groupby(self._left, key=lambda each: each[1:]):
            hashes = tuple(each[0] for each in group)
            if new is not None:
                self._events.append(BlocksStored(hashes, None, (), new))
            self._events.append(BlocksRemoved(hashes, old))
        self._left.clear()
