"""Answers to prefix lookups: bounded in number and time, degraded instead of failed.

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
"""Told of a lookup: namespace, hashes asked for, leading blocks that somebody holds."""


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
        """The answer to one question; degraded when the store cannot be asked in time."""
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
        # A queue would only add waiting to questions whose askers do not wait long.
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
