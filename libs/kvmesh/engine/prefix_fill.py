"""Prefixes that arrive from other workers: for a waiting sequence, or for the cache alone.

While a prefix arrives, a writer outside of the engine uses a sequence's blocks. The sequence is
HELD then. If it is released meanwhile, its blocks are freed once the writer has left them.
Tests: tests/integration/test_prefix_fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.prefix_room import PrefixRoom, PrefixRooms
from kvmesh.kv.sequence_blocks import GroupCache, SequenceBlocks


class PrefixFill:
    """One arriving prefix: call `open`, fill `blocks`, `close`, then `end`, in this order.

    Before `open`, `adopt` takes blocks that others brought.

    Args:
        sequence: sequence that waits for it; None fills the cache alone.

    Attributes:
        hashes: hashes of the blocks that may arrive, from the sequence's first one on.
    """

    def __init__(
        self,
        fills: PrefixFills,
        kv: SequenceBlocks,
        hashes: SequenceOf[BlockHash],
        sequence: Sequence | None,
    ) -> None:
        self.hashes = tuple(hashes)
        self._fills = fills
        self._kv = kv
        self._sequence = sequence
        self._room: PrefixRoom | None = None

    @property
    def num_held(self) -> int:
        """Number of leading blocks that are in the pool and stay until `end`."""
        return self._kv.num_sealed

    @property
    def kinds(self) -> SequenceOf[int]:
        """Kinds of the opened blocks, see `ArrivingBlock`."""
        assert self._room is not None, "opened before"
        return tuple(self._room.kinds)

    @property
    def state(self) -> SequenceOf[int]:
        """Opened blocks that receive a state."""
        assert self._room is not None, "opened before"
        return tuple(self._room.state)

    def adopt(self) -> int:
        """Takes leading blocks that came into the prefix cache meanwhile; returns how many."""
        assert self._room is None, "a writer is in the blocks"
        if self._sequence is not None and self._sequence.state is SequenceState.GONE:
            return 0
        held = self._kv.num_sealed
        length = self._fills.rooms.adopt(self._kv, self.hashes)
        if self._sequence is not None and length > held:
            self._fills.filled(self._sequence, held, length)
        return length - held

    def open(self, length: int, num_tokens: int = 0) -> SequenceOf[int] | None:
        """Opens room for a prefix of `length` blocks; returns the blocks to write, in order.

        Args:
            num_tokens: the sequence computes up to here meanwhile; 0 if it waits.

        Returns:
            None if there is no room, or the sequence has ended.
        """
        if self._sequence is not None and self._sequence.state is SequenceState.GONE:
            return None
        try:
            self._room = self._fills.rooms.open(self._kv, length, num_tokens)
        except OutOfBlocksError:
            return None
        return self._room.blocks

    def close(self, num_filled: int) -> None:
        """Ends the writing; `num_filled` leading blocks hold their KV."""
        room, self._room = self._room, None
        assert room is not None, "opened before"
        length = self._fills.rooms.close(room, self.hashes, num_filled)
        if self._sequence is not None and length > room.num_held:
            self._fills.filled(self._sequence, room.num_held, length)

    def end(self) -> None:
        """Releases the blocks, which stay cached until their room is needed."""
        assert self._room is None, "closed before"
        self._fills.end(self._kv, self._sequence)


class PrefixFills:
    """All prefixes that arrive at one worker.

    Args:
        free: gives back the blocks of a sequence.
    """

    def __init__(
        self,
        cache: GroupCache,
        pool: BlockPool,
        groups: KvGroups,
        free: Callable[[Sequence], None],
    ) -> None:
        self.rooms = PrefixRooms(cache, pool, groups)
        self._cache = cache
        self._size = pool.block_size
        self._free = free
        self._filling: set[Sequence] = set()
        self._num_loose = 0
        self.on_filled: Callable[[Sequence, int], None] | None = None
        """Called with a sequence and the index of the first block that arrived."""

    @property
    def num_open(self) -> int:
        """Number of prefixes that are arriving."""
        return len(self._filling) + self._num_loose

    def begin(self, hashes: SequenceOf[BlockHash]) -> PrefixFill:
        """Begins a prefix for the cache alone."""
        self._num_loose += 1
        return PrefixFill(self, self._cache.resume(hashes), hashes, None)

    def begin_for(self, sequence: Sequence, num_reusable: int) -> PrefixFill:
        """Begins a prefix for a sequence that is HELD and has not started to compute.

        Args:
            num_reusable: maximum number of leading blocks that it may take from a cache.
        """
        assert sequence.state is SequenceState.HELD, sequence.state
        assert sequence not in self._filling, "one prefix at a time"
        self._filling.add(sequence)
        return PrefixFill(self, sequence.kv, sequence.chain.hashes[:num_reusable], sequence)

    def defers(self, sequence: Sequence) -> bool:
        """Returns whether a released sequence must keep its blocks for a writer."""
        return sequence in self._filling

    def filled(self, sequence: Sequence, first: int, length: int) -> None:
        """Lets a sequence continue after `length` blocks."""
        sequence.num_computed = sequence.num_cached = length * self._size
        if self.on_filled is not None:
            self.on_filled(sequence, first)

    def end(self, kv: SequenceBlocks, sequence: Sequence | None) -> None:
        """Ends an arriving prefix."""
        if sequence is None:
            self._num_loose -= 1
            self._cache.release(kv)
            return
        self._filling.remove(sequence)
        if sequence.state is SequenceState.GONE:
            self._free(sequence)
