"""A pool's view of the tiers below it (`tiers.py`), and theirs of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.pool import OldBlocks
from kvmesh.core.types import BlockHash


@dataclass(frozen=True, slots=True)
class UnsavedBlock:
    """A block without a copy in a lower tier: its KV would be lost if it were evicted.

    Attributes:
        life: number of earlier evictions from this block id, for `BlockPool.is_same`.
    """

    block: int
    key: BlockHash
    life: int


class LowerCopies(Protocol):
    """Copies of the pool's blocks in lower tiers of this worker."""

    def __contains__(self, key: object) -> bool:
        """Returns whether the block with this hash can be brought up."""
        ...

    def left(self, key: BlockHash) -> None:
        """Records that the pool evicted a block that a tier keeps."""
        ...

    def keys(self) -> Sequence[BlockHash]:
        """Returns the hashes of all blocks that can be brought up."""
        ...

    def tier_of(self, key: BlockHash) -> str | None:
        """Returns the name of the fastest tier that has a block."""
        ...

    def oldest(self, limit: int) -> Sequence[OldBlocks]:
        """Returns the blocks that leave each nearly full tier next, at most `limit` of each."""
        ...

    def evict_first(self, keys: Sequence[BlockHash]) -> None:
        """Makes copies of these blocks the next ones to leave, the last of `keys` first."""
        ...


def with_tiers(below: LowerCopies, keys: Sequence[BlockHash]) -> Iterator[tuple[BlockHash, str]]:
    """Yields each block with the fastest tier that has it."""
    for key in keys:
        tier = below.tier_of(key)
        assert tier is not None, "a tier has what it names"
        yield key, tier
