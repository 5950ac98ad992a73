"""Brings up prefixes from the tiers for requests that were routed here but not accepted yet.

Between a route and its acceptance are a reservation elsewhere and, on a busy worker, the wait for a
slot. Blocks that come up meanwhile go to the prefix cache. They can be evicted there like any
others, so a prefetch takes nothing from accepted requests. Any request that is accepted first finds
them. Tests: tests/integration/test_prefetch.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import BlockHash, RequestId
from kvmesh.engine.core import EngineCore
from kvmesh.engine.tiered_cache import TieredCache
from kvmesh.kv.hashing import split_hashes
from kvmesh.runtime.worker_tiers import load_prefix
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.prefill_service_pb2 import PrefillPrefetch

log = event_logger(__name__)

MAX_PREFETCHES = 4
"""Maximum number of prefetches at a time.

More would evict each other's blocks; further prefixes come up with their offers.
"""

ROOM = 2
"""Room that a prefetch needs, as a multiple of its prefix: blocks that are free or can be evicted.
"""

SLICE_BYTES = 64 << 20
"""Bytes after which a cancelled prefetch ends.

Models with several groups bring up all or nothing, as a part of a window or of a state is worth
nothing.
"""


@dataclass(frozen=True, slots=True)
class _Prefetch:
    gateway: object
    task: asyncio.Task[None]


class Prefetches:
    """All prefetches of one worker.

    Attributes:
        begun_total: number of prefetches since the start.
    """

    def __init__(self, core: EngineCore, tiers: TieredCache) -> None:
        self._core = core
        self._tiers = tiers
        self._running: dict[RequestId, _Prefetch] = {}
        self.begun_total = 0
        is_plain = core.spec.groups.is_plain
        self._step = max(1, SLICE_BYTES // core.spec.layout.block_bytes) if is_plain else 0

    @property
    def num_running(self) -> int:
        """Number of prefetches in progress."""
        return len(self._running)

    def begin(self, gateway: object, message: PrefillPrefetch) -> None:
        """Starts to bring up a prefix's blocks from the tiers, if that pays.

        Args:
            gateway: the request's gateway; the end of its stream ends the prefetch.
        """
        request_id = RequestId(message.request_id)
        if request_id in self._running or len(self._running) >= MAX_PREFETCHES:
            return
        try:
            hashes = split_hashes(message.block_hashes)
        except ProtocolError as error:
            log.warning("bad_prefetch", request_id=request_id, error=str(error))
            return
        task = asyncio.create_task(self._bring_up(hashes), name=f"prefetch {request_id}")
        self._running[request_id] = _Prefetch(gateway, task)
        self.begun_total += 1
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def end(self, request_id: RequestId) -> None:
        """Cancels a request's prefetch: it is no longer needed."""
        if (prefetch := self._running.get(request_id)) is not None:
            prefetch.task.cancel()

    def end_of(self, gateway: object) -> None:
        """Cancels the prefetches of a gateway that is gone."""
        for each in list(self._running.values()):
            if each.gateway is gateway:
                each.task.cancel()

    async def settled(self, request_id: RequestId) -> None:
        """Waits until a request's prefetch, if any, is over: two loads would read the same."""
        if (prefetch := self._running.get(request_id)) is not None:
            await asyncio.wait([prefetch.task])

    async def _bring_up(self, hashes: Sequence[BlockHash]) -> None:
        step = self._step or len(hashes)
        # Blocks are held while they are written, and a prefetch must not keep its own request out.
        if self._core.pool.num_free < ROOM * len(hashes):
            return
        if self._tiers.outside is not None:
            await self._tiers.outside.bring(hashes)
        for end in range(step, len(hashes) + step, step):
            fill = self._core.fills.begin(hashes[:end])
            if fill.num_held < len(fill.hashes) and self._tiers.pays(fill.hashes, fill.num_held):
                await load_prefix(self._tiers, fill)
            else:
                fill.end()
