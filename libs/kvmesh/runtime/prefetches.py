"""Prefixes that come up from the tiers for requests that were routed here and are not accepted yet.

Between a route and its acceptance lie a reservation elsewhere and, on a busy worker, the wait for a
slot. What comes up meanwhile goes to the prefix cache, where it can be evicted like anything else,
so that a prefetch takes nothing away from requests that are here; whoever is accepted first finds
it. Tests: tests/integration/test_prefetch.py.
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
"""More at a time would only evict each other's blocks; further ones are left to their offers."""

ROOM = 2
"""Times a prefix that have to be free, or could be evicted, before it comes up ahead."""

SLICE_BYTES = 64 << 20
"""A prefetch that is cancelled ends after so much. Models with several groups bring up all or
nothing, as a part of a window or of a state is worth nothing."""


@dataclass(frozen=True, slots=True)
class _Prefetch:
    gateway: object
    task: asyncio.Task[None]


class Prefetches:
    """All prefetches of one worker.

    Attributes:
        begun_total: since the start.
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
        """Prefixes on their way up."""
        return len(self._running)

    def begin(self, gateway: object, message: PrefillPrefetch) -> None:
        """Begins to bring up what is below of a prefix, if that pays.

        Args:
            gateway: whose request it is; it ends with the gateway's stream.
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
        """Nobody waits for it any more."""
        if (prefetch := self._running.get(request_id)) is not None:
            prefetch.task.cancel()

    def end_of(self, gateway: object) -> None:
        """A gateway is gone."""
        for each in list(self._running.values()):
            if each.gateway is gateway:
                each.task.cancel()

    async def settled(self, request_id: RequestId) -> None:
        """Returns when a request's prefetch is over, if there is one: two would read the same."""
        if (prefetch := self._running.get(request_id)) is not None:
            await asyncio.wait([prefetch.task])

    async def _bring_up(self, hashes: Sequence[BlockHash]) -> None:
        step = self._step or len(hashes)
        # While blocks are written they are held: what comes must not keep its own request out.
        if self._core.pool.num_free < ROOM * len(hashes):
            return
        for end in range(step, len(hashes) + step, step):
            fill = self._core.fills.begin(hashes[:end])
            if fill.num_held < len(fill.hashes) and self._tiers.pays(fill.hashes, fill.num_held):
                await load_prefix(self._tiers, fill)
            else:
                fill.end()
