"""Tells the worker that a route names first of prefixes that it holds below its pool, so that they
come up while the request reserves elsewhere and waits for a slot.

Tests: tests/integration/test_gateway_asked.py, tests/integration/test_prefetch.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from kvmesh.core.errors import LostError
from kvmesh.core.types import BlockHash, Candidate, RequestId, WorkerId


class PrefetchSession(Protocol):
    """The part of a `WorkerSession` that prefetches need."""

    worker_id: WorkerId

    def prefetch(self, request_id: RequestId, hashes: Sequence[BlockHash]) -> None:
        """Says what may be offered; raises LostError without a connection."""
        ...

    def end_prefetch(self, request_id: RequestId) -> None:
        """Says that it will not be."""
        ...


class Sessions(Protocol):
    """Connections to workers."""

    def session(self, candidate: Candidate) -> PrefetchSession:
        """The one to a worker; raises LostError if the worker is gone."""
        ...


class Prefetch:
    """What one request has asked for; at most one worker brings up something for it."""

    def __init__(self, sessions: Sessions, request_id: RequestId) -> None:
        self._sessions = sessions
        self._request_id = request_id
        self._session: PrefetchSession | None = None

    def begin(self, candidate: Candidate, hashes: Sequence[BlockHash]) -> None:
        """A plan names a worker first; the one of an earlier plan may stop.

        Args:
            hashes: of the leading blocks that it holds.
        """
        if self._session is not None and self._session.worker_id == candidate.worker_id:
            return
        self.end()
        source = candidate.source
        if not (candidate.host_tokens or candidate.disk_tokens):
            return
        if source is not None and source.before_load:
            return  # it fetches that from another worker
        # Without a connection the offer will open one, and the worker brings it up then.
        with contextlib.suppress(LostError):
            session = self._sessions.session(candidate)
            session.prefetch(self._request_id, hashes)
            self._session = session

    def taken(self, worker_id: WorkerId) -> None:
        """A worker computes the prompt."""
        if self._session is not None and self._session.worker_id == worker_id:
            self._session = None
        self.end()

    def end(self) -> None:
        """The request needs it no more; may be called again."""
        session, self._session = self._session, None
        if session is not None:
            session.end_prefetch(self._request_id)
