"""Net changes of a worker's announced names between two calls of `take`.

Tests: tests/unit/kv/test_block_news.py, tests/property/test_tiers.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvmesh.core.block_names import IN_TIER, TELLS_STATES, TELLS_TIERS, saved_state
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash
from kvmesh.kv.groups import is_state_key


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Names that came and went between two calls of `take`; no name is in both."""

    stored: list[BlockHash]
    removed: list[BlockHash]


def is_announced(key: BlockHash) -> bool:
    """Whether others are told of a block; longer keys name groups that only this pool knows."""
    return len(key) <= BLOCK_HASH_BYTES


class BlockNews:
    """Turns what happens to the blocks of one worker into names (`block_names.py`).

    Args:
        state_blocks: number of blocks of one saved state; 0 without linear layers.
    """

    def __init__(self, state_blocks: int = 0) -> None:
        # Net changes since the last `take`: True is stored, False is removed.
        self._changes: dict[BlockHash, bool] = {}
        self._tier_of: dict[BlockHash, str] = {}
        self._state_blocks = state_blocks
        self._num_parts: dict[BlockHash, int] = {}
        self._always: list[BlockHash] = []
        if state_blocks:
            self._tell_always(TELLS_STATES)

    def __bool__(self) -> bool:
        return bool(self._changes)

    def tells_tiers(self, found: Iterable[tuple[BlockHash, str]]) -> None:
        """Announces that the worker has tiers from now on.

        Args:
            found: blocks that lie in tiers already, each with its tier.
        """
        self._tell_always(TELLS_TIERS)
        for key, tier in found:
            self.stored(key)
            self.lowered(key, tier)

    def stored(self, key: BlockHash) -> None:
        """Records that the worker has a block that it had nowhere before."""
        if is_announced(key):
            self._change(key, is_true=True)
        elif is_state_key(key):
            self._count_part(key, 1)

    def removed(self, key: BlockHash) -> None:
        """Records that the worker has a block nowhere any more."""
        if is_announced(key):
            self.raised(key)
            self._change(key, is_true=False)
        elif is_state_key(key):
            self._count_part(key, -1)

    def raised(self, key: BlockHash) -> None:
        """Records that a block is in the pool again."""
        tier = self._tier_of.pop(key, None)
        if tier is not None:
            self._change(IN_TIER[tier](key), is_true=False)

    def lowered(self, key: BlockHash, tier: str) -> None:
        """Records that a block is not in the pool; `tier` is the fastest tier that has it."""
        if not is_announced(key) or self._tier_of.get(key) == tier:
            return
        self.raised(key)
        self._tier_of[key] = tier
        self._change(IN_TIER[tier](key), is_true=True)

    def take(self) -> BlockEvents:
        """Returns and forgets the changes so far, in order."""
        changes, self._changes = self._changes, {}
        return BlockEvents(
            stored=[name for name, is_true in changes.items() if is_true],
            removed=[name for name, is_true in changes.items() if not is_true],
        )

    def names(self, held: Iterable[BlockHash]) -> list[BlockHash]:
        """Returns all names that hold true now; for a snapshot.

        Args:
            held: hashes of all announced blocks.
        """
        lower = (IN_TIER[tier](key) for key, tier in self._tier_of.items())
        whole = self._state_blocks
        states = (saved_state(key) for key, count in self._num_parts.items() if count == whole)
        return [*self._always, *held, *lower, *states]

    def _tell_always(self, name: BlockHash) -> None:
        self._always.append(name)
        self._change(name, is_true=True)

    def _count_part(self, key: BlockHash, change: int) -> None:
        """Counts a state block that came or went: only a complete state can be resumed from."""
        block_hash, whole = BlockHash(key[:BLOCK_HASH_BYTES]), self._state_blocks
        before = self._num_parts.get(block_hash, 0)
        after = before + change
        if after:
            self._num_parts[block_hash] = after
        else:
            del self._num_parts[block_hash]
        if (before == whole) != (after == whole):
            self._change(saved_state(block_hash), is_true=after == whole)

    def _change(self, name: BlockHash, *, is_true: bool) -> None:
        # A name comes and goes in turn. If the previous change was not taken yet, the opposite
        # change cancels it and the reader's view stays correct.
        if self._changes.pop(name, None) is None:
            self._changes[name] = is_true

    def check_integrity(self, held: Collection[BlockHash], lower: dict[BlockHash, str]) -> None:
        """Raises AssertionError if the records contradict the arguments.

        Args:
            held: hashes of all announced blocks.
            lower: the fastest tier of each announced block that is not in the pool.
        """
        assert self._tier_of == lower, "a block is told to be where it is not"
        names = set(self.names(held))
        for name, is_true in self._changes.items():
            assert (name in names) == is_true, "an event contradicts the index"
