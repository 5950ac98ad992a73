"""Byte stores of the tiers: copy blocks from the pool into places, and back.

Tests: tests/unit/engine/test_tiered_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvmesh.engine.copier import Copier
from kvmesh.engine.host_arena import HostArena
from kvmesh.kv.tiers import Copy
from kvmesh.policy.linear_time import LinearTime

BATCH_BYTES = 8 << 20
"""Maximum bytes of one copy down, since a prompt that waits for its prefix waits for it."""

HOST_CALL_S, HOST_BYTES_PER_S = 0.0002, 5e9
"""Assumed of loads from host memory before one was measured."""

Good = list[bool]
"""Per block of a call, whether its copy is intact."""


class TierStore(Protocol):
    """Copies outside of the event loop. A call owns its places and blocks until `done`."""

    @property
    def num_at_once(self) -> int:
        """Maximum number of blocks of one `save`."""
        ...

    @property
    def first_speed(self) -> LinearTime:
        """Assumed time of loads, in blocks, before one was measured."""
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
            is_same: called after the blocks were read; returns per block whether it still holds the
                same KV.
        """
        ...

    def load(
        self, places: Sequence[int], blocks: Sequence[int], done: Callable[[Good], None]
    ) -> None:
        """Copies places into blocks of the pool."""
        ...

    def close(self) -> None:
        """Frees its memory; no copy may be under way."""
        ...


class HostStore:
    """Store in the places of a host memory arena."""

    def __init__(self, arena: HostArena, copier: Copier) -> None:
        self._arena = arena
        self._copier = copier
        self.num_at_once = max(1, BATCH_BYTES // arena.block_bytes)
        self.first_speed = LinearTime(HOST_CALL_S, arena.block_bytes / HOST_BYTES_PER_S)

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
