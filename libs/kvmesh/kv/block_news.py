"""Net changes of a worker's announced names between two calls of `take`.

Tests: tests/unit/kv/test_block_news.py, tests/property/test_tiers.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvmesh.core.block_names import IN_TIER, TELLS_STATES, TELLS_TIERS, saved_state
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash
from kvmesh.kv.resume_points import ResumePoints


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Names that came and went between two calls of `take`; no name is in both."""

    stored: list[BlockHash]
    removed: list[BlockHash]


def is_announced(key: BlockHash) -> bool:
    """Whether a block is published; longer keys name groups that only this pool knows."""
    return len(key) <= BLOCK_HASH_BYTES


class BlockNews:
    """Turns what happens to the blocks of one worker into names (`block_names.py`).

    Args:
        groups: the model's KV groups; windows and states limit where a prefix can be resumed.
    """

    def __init__(self, groups: KvGroups, block_size: int) -> None:
        # Net changes since the last `take`: True is stored, False is removed.
        self._changes: dict[BlockHash, bool] = {}
        self._tier_of: dict[BlockHash, str] = {}
        self._points = ResumePoints(groups, block_size)
        self._has_points = self._points.is_needed
        self._told_points: set[BlockHash] = set()
        self._always: list[BlockHash] = []
        if self._has_points:
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
        if len(key) <= BLOCK_HASH_BYTES:  # `is_announced`, without a call for every block
            self._change(key, is_true=True)
        if self._has_points:
            self._tell_points(self._points.note(key, is_here=True))

    def follows(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """A block comes after another one of its prompt, or is the first."""
        if self._points.has_windows:
            self._tell_points(self._points.follows(block_hash, parent))

    def removed(self, key: BlockHash) -> None:
        """Records that the worker has a block nowhere any more."""
        if is_announced(key):
            self.raised(key)
            self._change(key, is_true=False)
        if self._has_points:
            self._tell_points(self._points.note(key, is_here=False))

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
        return [*self._always, *held, *lower, *map(saved_state, self._told_points)]

    def _tell_always(self, name: BlockHash) -> None:
        self._always.append(name)
        self._change(name, is_true=True)

    def _tell_points(self, changed: Iterable[BlockHash]) -> None:
        for block_hash in changed:
            is_point = self._points.is_point(block_hash)
            if is_point == (block_hash in self._told_points):
                continue
            if is_point:
                self._told_points.add(block_hash)
            else:
                self._told_points.discard(block_hash)
            self._change(saved_state(block_hash), is_true=is_point)

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
        assert self._told_points == set(self._points.points()), "a prefix ends where it cannot"
        names = set(self.names(held))
        for name, is_true in self._changes.items():
            assert (name in names) == is_true, "an event contradicts the index"
