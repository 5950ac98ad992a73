"""What a pool knows of the tiers below it (`tiers.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvmesh.core.types import BlockHash


class LowerCopies(Protocol):
    """What is kept of the pool's blocks elsewhere on this worker."""

    def __contains__(self, key: object) -> bool:
        """Whether the block of this hash can be brought back."""
        ...

    def left(self, key: BlockHash) -> None:
        """Says that the pool has given up a block that is kept."""
        ...

    def keys(self) -> Sequence[BlockHash]:
        """All that can be brought back."""
        ...

    def tier_of(self, key: BlockHash) -> str | None:
        """Name of the fastest tier that has a block."""
        ...


def with_tiers(below: LowerCopies, keys: Sequence[BlockHash]) -> Iterator[tuple[BlockHash, str]]:
    """Blocks that are below, each with the fastest tier that has it."""
    for key in keys:
        tier = below.tier_of(key)
        assert tier is not None, "a tier has what it names"
        yield key, tier
