"""Bytes of a tier: out of the pool into its places, and back.

Tests: tests/unit/engine/test_tiered_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvmesh.engine.copier import Copier
from kvmesh.engine.host_arena import HostArena
from kvmesh.kv.tiers import Copy

BATCH_BYTES = 8 << 20
"""Most that is copied down at once: a prompt that waits for its prefix waits behind this."""

Good = list[bool]
"""Of each block of a call, whether its copy is whole."""


class TierStore(Protocol):
    """Copies beside the event loop. Places and blocks belong to a call until `done` is called."""

    @property
    def num_at_once(self) -> int:
        """Blocks that one `save` takes at most."""
        ...

    def save(
        self,
        blocks: Sequence[int],
        copies: Sequence[Copy],
        is_same: Callable[[], Good],
        done: Callable[[Good], None],
    ) -> None:
        """Copies blocks of the pool to the places of `copies`.

        Args:
            is_same: of each block, whether it still is what it was, when it has been read.
        """
        ...

    def load(
        self, places: Sequence[int], blocks: Sequence[int], done: Callable[[Good], None]
    ) -> None:
        """Copies places into blocks of the pool."""
        ...

    def close(self) -> None:
        """Gives its memory up; no copy is being made."""
        ...


class HostStore:
    """Places of an arena in host memory."""

    def __init__(self, arena: HostArena, copier: Copier) -> None:
        self._arena = arena
        self._copier = copier
        self.num_at_once = max(1, BATCH_BYTES // arena.block_bytes)

    def save(
        self,
        blocks: Sequence[int],
        copies: Sequence[Copy],
        is_same: Callable[[], Good],
        done: Callable[[Good], None],
    ) -> None:
        """See `TierStore.save`."""
        places = [copy.place for copy in copies]
        self._copier.start(partial(self._arena.store, blocks, places), lambda: done(is_same()))

    def load(
        self, places: Sequence[int], blocks: Sequence[int], done: Callable[[Good], None]
    ) -> None:
        """See `TierStore.load`."""
        good = [True] * len(blocks)
        self._copier.start(partial(self._arena.load, places, blocks), lambda: done(good))

    def close(self) -> None:
        """See `TierStore.close`."""
        self._arena.close()
