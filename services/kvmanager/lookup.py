"""Answers prefix lookups, limited in number and time. A failed lookup gets a degraded answer.

Tests: tests/unit/kvmanager/test_guard.py, tests/integration/test_kvmanager.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvmesh.core.slots import PrefixMatch
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.rpc.convert import prefix_match_to_proto
from kvmesh.v1 import kv_manager_service_pb2 as pb
from services.kvmanager import metrics
from services.kvmanager.config import LimitConfig
from services.kvmanager.guard import StoreGuard

NoteRead = Callable[[str, bytes, int], None]
"""Called with a lookup's namespace, its hashes, and the number of leading blocks found."""


class PrefixLookups:
    """Asks the store for prefix matches.

    Args:
        note_read: called for each lookup that found something; returns at once.
    """

    def __init__(self, guard: StoreGuard, limits: LimitConfig, note_read: NoteRead) -> None:
        self._guard = guard
        self._limits = limits
        self._note_read = note_read
        self._active = 0

    async def answer(self, request: pb.MatchPrefixRequest) -> pb.MatchPrefixResponse:
        """Answers one lookup. The answer is degraded if the store does not answer in time."""
        begin = time.perf_counter()
        matches = await self._match(request)
        if matches is None:
            metrics.MATCHES.labels("degraded").inc()
            return pb.MatchPrefixResponse(correlation_id=request.correlation_id, degraded=True)
        metrics.MATCHES.labels("hit" if matches else "miss").inc()
        metrics.MATCH_SECONDS.observe(time.perf_counter() - begin)
        if matches:
            self._note_read(request.namespace, request.block_hashes, matches[0].num_blocks)
        return pb.MatchPrefixResponse(
            correlation_id=request.correlation_id, matches=map(prefix_match_to_proto, matches)
        )

    async def _match(self, request: pb.MatchPrefixRequest) -> list[PrefixMatch] | None:
        # A queue would only add delay: the schedulers do not wait long for their answer.
        if self._active >= self._limits.max_lookups:
            return None
        self._active += 1
        try:
            return await self._guard.call(
                lambda store: store.match(request.namespace, request.block_hashes),
                self._limits.lookup_timeout_s,
            )
        except StoreUnavailableError:
            return None
        finally:
            self._active -= 1
