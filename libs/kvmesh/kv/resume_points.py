"""Blocks after which a prefix can be resumed: the windows and the state there are cached.

Full groups are left out, since their blocks are published one by one. A window group can resume
after a block if it has all blocks of the next query's window. The order of blocks is learned as
blocks become full. Blocks found on disk have no known predecessor and count as complete, since the
end of a prefix is evicted before its beginning.
Tests: tests/property/test_resume_points.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash
from kvmesh.kv.groups import num_blocks_of


class ResumePoints:
    """Blocks of one worker that are in its windows and states, in the pool or below."""

    def __init__(self, groups: KvGroups, block_size: int) -> None:
        self._state_blocks = groups.state_blocks
        self._num_parts: dict[BlockHash, int] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}
        # The query after a block sees its own position and `window - 1` before it.
        self._runs = {
            group: _WindowRuns(num_blocks_of(window - 1, block_size), self._parents, self._children)
            for group, window in enumerate(groups.windows)
            if window > 1
        }

    @property
    def is_needed(self) -> bool:
        """Whether there is a window or a state."""
        return bool(self._runs or self._state_blocks)

    @property
    def has_windows(self) -> bool:
        """Whether `follows` is of use."""
        return bool(self._runs)

    def follows(self, block_hash: BlockHash, parent: BlockHash | None) -> list[BlockHash]:
        """A block is known to come after another one, or to be the first.

        Returns:
            Blocks of which `is_point` may be another now, here and below.
        """
        if block_hash in self._parents:
            return []
        self._parents[block_hash] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(block_hash)
        return [each for runs in self._runs.values() for each in runs.settle(block_hash)]

    def note(self, key: BlockHash, *, is_here: bool) -> list[BlockHash]:
        """A block of any group or state came, or is nowhere any more."""
        block_hash, kind = BlockHash(key[:BLOCK_HASH_BYTES]), key[BLOCK_HASH_BYTES:]
        changed = [block_hash]
        if kind.startswith(b"s"):
            count = self._num_parts.get(block_hash, 0) + (1 if is_here else -1)
            if count:
                self._num_parts[block_hash] = count
            else:
                del self._num_parts[block_hash]
        else:
            group = kind[1] if kind else 0
            if group in self._runs:
                changed += self._runs[group].note(block_hash, is_here=is_here)
        if not is_here:
            self._forget(block_hash)
        return changed

    def is_point(self, block_hash: BlockHash) -> bool:
        """Whether a prefix that ends with this block can be resumed, if its full groups have it."""
        if self._num_parts.get(block_hash, 0) != self._state_blocks:
            return False
        return all(runs.is_whole(block_hash) for runs in self._runs.values())

    def points(self) -> Iterator[BlockHash]:
        """All of them, of those that a window or a state has."""
        known = dict.fromkeys(self._num_parts)
        for runs in self._runs.values():
            known |= dict.fromkeys(runs.here)
        return (each for each in known if self.is_point(each))

    def _forget(self, block_hash: BlockHash) -> None:
        """Drops a block's place in its prefix once no window group holds the block."""
        if any(block_hash in runs.here for runs in self._runs.values()):
            return
        parent = self._parents.pop(block_hash, None)
        if parent is not None:
            self._children[parent].discard(block_hash)
            if not self._children[parent]:
                del self._children[parent]


class _WindowRuns:
    """Counts, for one window group, the consecutive blocks up to each block, at most a window."""

    def __init__(
        self,
        need: int,
        parents: dict[BlockHash, BlockHash | None],
        children: dict[BlockHash, set[BlockHash]],
    ) -> None:
        self._need = need
        self._parents = parents
        self._children = children
        self.here: dict[BlockHash, int] = {}

    def is_whole(self, block_hash: BlockHash) -> bool:
        return self.here.get(block_hash, 0) == self._need

    def note(self, block_hash: BlockHash, *, is_here: bool) -> list[BlockHash]:
        if not is_here:
            del self.here[block_hash]
            return self._settle_children(block_hash)
        self.here[block_hash] = 0
        return self.settle(block_hash)

    def settle(self, block_hash: BlockHash) -> list[BlockHash]:
        """Recounts from a block on; returns the blocks whose count changed."""
        if block_hash not in self.here:
            return []
        before = self.here[block_hash]
        self.here[block_hash] = count = self._count(block_hash)
        return [] if count == before else [block_hash, *self._settle_children(block_hash)]

    def _settle_children(self, block_hash: BlockHash) -> list[BlockHash]:
        changed: list[BlockHash] = []
        left = list(self._children.get(block_hash, ()))
        while left:
            each = left.pop()
            if each in self.here and self.here[each] != (count := self._count(each)):
                self.here[each] = count
                changed.append(each)
                left += self._children.get(each, ())
        return changed

    def _count(self, block_hash: BlockHash) -> int:
        parent = self._parents.get(block_hash)
        before = self._need if parent is None else self.here.get(parent, 0)
        return min(self._need, before + 1)
