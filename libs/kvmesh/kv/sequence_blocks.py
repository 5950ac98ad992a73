"""The blocks of sequences, in all groups of a model, over one pool. No I/O, no torch.

Tests: tests/unit/kv/test_sequence_blocks.py, tests/property/test_engine_core.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import (
    HOLE,
    first_visible,
    group_key,
    num_blocks_of,
    resume_length,
    save_positions,
    state_key,
)


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that a step writes beside the live one.

    Attributes:
        position: number of positions that the state covers.
        is_rolling: it stays with the sequence and is overwritten at the next block boundary.
    """

    position: int
    blocks: list[int]
    is_rolling: bool


@dataclass(frozen=True, slots=True)
class BlockSpot:
    """Position of a block in a sequence.

    Attributes:
        group: token group, or `STATE`.
        index: index in the group's table, or among the blocks of the state.
    """

    group: int
    index: int


STATE = -1


@dataclass(slots=True)
class SequenceBlocks:
    """Blocks of one sequence; each listed block counts as a reference in the pool.

    Attributes:
        tables: per token group, block ids by index; `HOLE` where none is held.
        num_sealed: number of leading indices that are registered in the prefix cache.
        state: blocks of the linear layers' state after the positions computed so far.
        source: blocks of the cached state that the first step starts from; empty after that step.
        saves: states that the step in flight writes.
        rolling: blocks of the state at the latest block boundary of generation, which becomes a
            cache entry when the sequence ends.
        rolling_at: position of the rolling state; 0 when it holds nothing yet.
    """

    tables: list[list[int]]
    num_sealed: int = 0
    state: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    saves: list[SavedState] = field(default_factory=list)
    rolling: list[int] = field(default_factory=list)
    rolling_at: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether no block is held."""
        held = any(block != HOLE for table in self.tables for block in table)
        return not (held or self.state or self.source or self.saves or self.rolling)


class GroupCache:
    """Takes and gives back blocks for sequences, and finds cached prefixes.

    Args:
        interval: positions between saved states, a multiple of the block size.
    """

    def __init__(self, pool: BlockPool, groups: KvGroups, interval: int) -> None:
        assert interval % pool.block_size == 0
        self._pool = pool
        self._groups = groups
        self._has_windows = any(groups.windows)
        self._interval = interval
        self._size = self.block_size = pool.block_size

    def resume(self, hashes: Sequence[BlockHash]) -> SequenceBlocks:
        """Returns the longest prefix that every group can resume, with references on its blocks."""
        pool, groups = self._pool, self._groups
        if groups == KvGroups():  # a model with one full group needs no search
            tables = [pool.match(hashes)]
            length = len(tables[0])
        else:
            length = resume_length(
                groups,
                len(hashes),
                self._size,
                lambda group, index: pool.find(group_key(hashes[index], group)) is not None,
                lambda length: self._saved(hashes[length - 1]) is not None,
            )
            tables = [self._cached(hashes, group, length) for group in range(len(groups.windows))]
        blocks = SequenceBlocks(tables, num_sealed=length)
        if groups.state_blocks and length:
            blocks.source = self._saved(hashes[length - 1]) or []
        for table in tables:
            pool.acquire([block for block in table if block != HOLE])
        pool.acquire(blocks.source)
        return blocks

    def _cached(self, hashes: Sequence[BlockHash], group: int, length: int) -> list[int]:
        first = first_visible(self._groups.windows[group], length * self._size, self._size)
        table = [HOLE] * min(first, length)
        for index in range(first, length):
            block = self._pool.find(group_key(hashes[index], group))
            assert block is not None, "a cached block is gone"
            table.append(block)
        return table

    def _saved(self, block_hash: BlockHash) -> list[int] | None:
        found = []
        for part in range(self._groups.state_blocks):
            block = self._pool.find(state_key(block_hash, part))
            if block is None:
                return None
            found.append(block)
        return found

    def reserve(self, blocks: SequenceBlocks, num_tokens: int, num_growth: int) -> None:
        """Takes blocks for the KV of `num_tokens` positions, and room for growth.

        Window groups get only the blocks of the window at the end.

        Raises:
            OutOfBlocksError: `blocks` holds the blocks taken so far.
        """
        self._take_state(blocks)
        count = num_blocks_of(num_tokens + num_growth, self._size)
        for window, table in zip(self._groups.windows, blocks.tables, strict=True):
            first = first_visible(window, num_tokens, self._size)
            self._fill(table, max(first, blocks.num_sealed if not window else 0), count)

    def grow(self, blocks: SequenceBlocks, start: int, end: int, *, whole: bool = False) -> None:
        """Takes the blocks that computing the positions from `start` to `end` needs.

        Args:
            whole: take blocks of full groups only, and no state: for blocks of a prompt that are
                taken ahead of its chunks.

        Raises:
            OutOfBlocksError: `blocks` holds the blocks taken so far.
        """
        if not whole:
            self._take_state(blocks)
        count = num_blocks_of(end, self._size)
        for window, table in zip(self._groups.windows, blocks.tables, strict=True):
            if not (whole and window):
                self._fill(table, start // self._size, count)

    def _take_state(self, blocks: SequenceBlocks) -> None:
        if not blocks.state:
            blocks.state = self._pool.allocate(self._groups.state_blocks)

    def _fill(self, table: list[int], first: int, count: int) -> None:
        """Takes blocks for the empty indices from `first` to `count` of a table."""
        held = len(table)
        if first <= held:
            holes = [index for index in range(first, min(held, count)) if table[index] == HOLE]
        else:
            table += [HOLE] * (first - held)
            held, holes = first, []
        before = next((b for b in reversed(table) if b != HOLE), None)
        fresh = self._pool.allocate(len(holes) + max(0, count - held), after=before)
        for index, block in zip(holes, fresh, strict=False):
            table[index] = block
        table += fresh[len(holes) :]

    def plan_saves(
        self,
        blocks: SequenceBlocks,
        start: int,
        end: int,
        num_prompt_tokens: int,
        hashes: Sequence[BlockHash],
    ) -> None:
        """Chooses the states that a step saves; leaves a state out if there is no room for it."""
        if not self._groups.state_blocks:
            return
        assert not blocks.saves, "the step before is not finished"
        size = self._size
        for position in save_positions(start, end, num_prompt_tokens, self._interval, size):
            if self._saved(hashes[position // size - 1]) is None:
                taken = self._try_state()
                if taken:
                    blocks.saves.append(SavedState(position, taken, is_rolling=False))
        latest = end // size * size
        if latest > max(start, num_prompt_tokens):
            blocks.rolling = blocks.rolling or self._try_state()
            if blocks.rolling:
                blocks.rolling_at = 0
                blocks.saves.append(SavedState(latest, blocks.rolling, is_rolling=True))

    def _try_state(self) -> list[int]:
        try:
            return self._pool.allocate(self._groups.state_blocks)
        except OutOfBlocksError:
            return []

    def drop_saves(self, blocks: SequenceBlocks) -> None:
        """Gives up the states that a step was to save: it was lost."""
        for saved in blocks.saves:
            if not saved.is_rolling:
                self._pool.release(saved.blocks)
        blocks.saves.clear()

    def finish_step(
        self, blocks: SequenceBlocks, num_computed: int, hashes: Sequence[BlockHash]
    ) -> None:
        """Registers blocks that a step completed, and releases blocks that no query needs now."""
        self.seal(blocks, num_computed, hashes)
        for saved in blocks.saves:
            if saved.is_rolling:
                blocks.rolling_at = saved.position
            else:
                self._publish_state(saved.blocks, saved.position, hashes)
        blocks.saves.clear()
        self._pool.release(blocks.source)
        blocks.source.clear()
        for window, table in zip(self._groups.windows, blocks.tables, strict=True):
            if window:
                self._trim(table, first_visible(window, num_computed, self._size))

    def seal(self, blocks: SequenceBlocks, num_computed: int, hashes: Sequence[BlockHash]) -> None:
        """Registers blocks that became full and computed, so that others can share them."""
        full = num_computed // self._size
        for index in range(blocks.num_sealed, full):
            if self._has_windows and any(table[index] != HOLE for table in blocks.tables):
                self._pool.follows(hashes[index], hashes[index - 1] if index else None)
            for group, table in enumerate(blocks.tables):
                if table[index] != HOLE:
                    self._pool.seal(table[index], group_key(hashes[index], group))
        blocks.num_sealed = max(blocks.num_sealed, full)

    def _publish_state(self, blocks: list[int], position: int, hashes: Sequence[BlockHash]) -> None:
        block_hash = hashes[position // self._size - 1]
        for part, block in enumerate(blocks):
            self._pool.seal(block, state_key(block_hash, part))
        self._pool.release(blocks)

    def _trim(self, table: list[int], first: int) -> None:
        """Releases the blocks before index `first`."""
        index = min(first, len(table))
        gone = []
        # Below some index all entries are holes already.
        while index and table[index - 1] != HOLE:
            index -= 1
            gone.append(table[index])
            table[index] = HOLE
        self._pool.release(gone[::-1])

    def contents(self, blocks: SequenceBlocks, num_computed: int) -> dict[BlockSpot, int]:
        """Returns the blocks that a sequence needs to go on after `num_computed` positions.

        Empty if it has not computed anything of its own yet.
        """
        if not num_computed or blocks.source:
            return {}
        count = num_blocks_of(num_computed, self._size)
        held = {
            BlockSpot(group, index): table[index]
            for group, (window, table) in enumerate(
                zip(self._groups.windows, blocks.tables, strict=True)
            )
            for index in range(first_visible(window, num_computed, self._size), count)
        }
        return held | {BlockSpot(STATE, part): block for part, block in enumerate(blocks.state)}

    def rebuild(
        self, spots: Sequence[BlockSpot], num_sealed: int, hashes: Sequence[BlockHash]
    ) -> tuple[SequenceBlocks, dict[BlockSpot, int]]:
        """Takes blocks for the spots of an earlier `contents`: cached ones if left, else new.

        Args:
            num_sealed: number of leading indices that were registered.

        Returns:
            The sequence's blocks, and the fresh ones among them, which hold nothing yet.

        Raises:
            OutOfBlocksError: nothing is held.
        """
        found: dict[BlockSpot, int] = {}
        for spot in spots:
            if spot.group != STATE and spot.index < num_sealed:
                block = self._pool.find(group_key(hashes[spot.index], spot.group))
                if block is not None:
                    found[spot] = block
        self._pool.acquire(list(found.values()))
        missing = [spot for spot in spots if spot not in found]
        try:
            fresh = dict(zip(missing, self._pool.allocate(len(missing)), strict=True))
        except OutOfBlocksError:
            self._pool.release(list(found.values()))
            raise
        count = max((spot.index + 1 for spot in spots if spot.group != STATE), default=0)
        blocks = SequenceBlocks([[HOLE] * count for _ in self._groups.windows])
        blocks.state = [fresh[spot] for spot in spots if spot.group == STATE]
        for spot in spots:
            if spot.group != STATE:
                blocks.tables[spot.group][spot.index] = found.get(spot, fresh.get(spot, HOLE))
        copied = min((spot.index for spot in missing if spot.group != STATE), default=num_sealed)
        # Restored copies are registered again, as if they had just been computed.
        blocks.num_sealed = min(copied, num_sealed)
        return blocks, fresh

    def drop_rolling(self, blocks: SequenceBlocks, hashes: Sequence[BlockHash]) -> bool:
        """Turns the rolling state into an evictable cache entry; False if there is none to turn."""
        writing = any(saved.is_rolling for saved in blocks.saves)
        if not blocks.rolling or writing:
            return False
        if blocks.rolling_at:
            self._publish_state(blocks.rolling, blocks.rolling_at, hashes)
        else:
            self._pool.release(blocks.rolling)
        blocks.rolling = []
        blocks.rolling_at = 0
        return True

    def check_integrity(self, blocks: SequenceBlocks, num_computed: int) -> None:
        """Raises AssertionError unless the blocks that the next query sees are held."""
        for window, table in zip(self._groups.windows, blocks.tables, strict=True):
            first = first_visible(window, num_computed, self._size)
            count = num_blocks_of(num_computed, self._size)
            seen = table[first:count]
            assert len(seen) == count - first, "a table is too short"
            assert HOLE not in seen, "a block that is seen is not held"
        if self._groups.state_blocks and num_computed:
            assert blocks.state or blocks.source, "the state is not held"

    def release(self, blocks: SequenceBlocks, hashes: Sequence[BlockHash] = ()) -> None:
        """Releases all blocks; registered ones stay cached until their room is needed.

        Args:
            hashes: hashes of the sequence; with them the rolling state stays cached, too.
        """
        self.drop_saves(blocks)
        if hashes:
            self.drop_rolling(blocks, hashes)
        for single in (blocks.rolling, blocks.source, blocks.state):
            self._pool.release(single)
        for table in blocks.tables:
            self._pool.release([block for block in table if block != HOLE])
        # New lists: a chunk of the step before may still read the old ones.
        blocks.tables = [[] for _ in blocks.tables]
        blocks.rolling, blocks.source, blocks.state = [], [], []
        blocks.rolling_at = blocks.num_sealed = 0
