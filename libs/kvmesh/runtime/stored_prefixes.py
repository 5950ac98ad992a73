"""Prefixes that other programs write into this worker's prefix cache (`KvPoolService.StoreBlocks`).

A program with the mesh's secret writes KV that other requests read as the KV of a prefix, and no
worker can check it. So a worker accepts none unless its operator sets how many at a time.
Tests: tests/integration/test_pool_facade.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from kvmesh.core.types import BlockHash, Refusal, RefusalReason, RequestId, Reservation
from kvmesh.engine.core import EngineCore
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.engine.prefix_fill import PrefixFill
from kvmesh.runtime.arriving_kv import ArrivingKv
from kvmesh.runtime.part_arrival import PartArrival

_ATTEMPT = 1


class StoredPrefixes:
    """The prefixes that are being written.

    Args:
        max_open: maximum number at one time; 0 accepts none.
        max_blocks: maximum number of blocks of all of them together.
        on_stored: called when blocks came into the prefix cache.
    """

    def __init__(
        self,
        core: EngineCore,
        arriving: ArrivingKv,
        max_open: int,
        max_blocks: int,
        on_stored: Callable[[], None],
    ) -> None:
        self._core = core
        self._arriving = arriving
        self._max_open = max_open
        self._max_blocks = max_blocks
        self._on_stored = on_stored
        self._open: dict[RequestId, PartArrival] = {}
        self._numbers = itertools.count(1)
        self._ended = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Number of prefixes that are being written."""
        return len(self._open)

    def reserve(self, hashes: Sequence[BlockHash]) -> Reservation | Refusal | None:
        """Makes room for the missing blocks of a prefix; None if no block is missing.

        Args:
            hashes: chained, from the root on.
        """
        refusal = self.refusal()
        if refusal is not None:
            return refusal
        fill = self._core.fills.begin(hashes)
        num_missing = len(hashes) - fill.num_held
        if not num_missing:
            fill.end()
            return None
        taken = sum(len(part.arriving) for part in self._open.values())
        blocks = fill.open(len(hashes)) if taken + num_missing <= self._max_blocks else None
        if blocks is None:
            fill.end()
            return Refusal(RefusalReason.NO_BLOCKS, f"no room for {num_missing} blocks")
        name = RequestId(f"store-{next(self._numbers)}")
        part = PartArrival(
            name,
            _ATTEMPT,
            blocks,
            fill.kinds,
            fill.num_held,
            self._core.spec.stages,
            LayerGate(),
            partial(self._end, name, fill),
        )
        self._open[name] = part
        return self._arriving.reserve_part(part)

    def refusal(self) -> Refusal | None:
        """Returns why no prefix can be stored now; None if one can."""
        if not self._max_open:
            text = "this worker takes no blocks from others; its fetch.max_stores is 0"
            return Refusal(RefusalReason.INVALID, text)
        if not self._core.spec.groups.is_plain:
            text = "windows and states cannot be stored from elsewhere"
            return Refusal(RefusalReason.INVALID, text)
        if len(self._open) >= self._max_open:
            return Refusal(RefusalReason.BUSY, f"{len(self._open)} prefixes are being written")
        return None

    def _end(self, name: RequestId, fill: PrefixFill) -> None:
        """Called when nothing writes into a prefix's blocks any more."""
        part = self._open.pop(name)
        num_blocks = len(part.arriving)
        fill.close(num_blocks if part.is_complete else 0)
        fill.end()
        if part.is_complete:
            self._on_stored()
        self._ended.set()

    async def drain(self) -> None:
        """Ends incomplete prefixes, and waits until nothing is written any more."""
        self._max_open = 0
        for part in list(self._open.values()):
            if part.reservation_id is not None:
                self._arriving.cancel_part(part)
        while self._open:
            self._ended.clear()
            await self._ended.wait()
