"""Prefetches a prompt's prefix into the pool of the worker that will probably compute the prompt.

The first worker of a plan may hold prefix blocks below its pool, in host memory or on disk. The
gateway tells it early, so that it loads them while the request reserves elsewhere and waits for a
slot. Tests: tests/integration/test_gateway_asked.py, tests/integration/test_prefetch.py.
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
        """Tells the worker the blocks of a prompt that may be offered.

        Raises:
            LostError: there is no connection.
        """
        ...

    def end_prefetch(self, request_id: RequestId) -> None:
        """Tells the worker that the prompt will not be offered."""
        ...


class Sessions(Protocol):
    """Connections to workers."""

    def session(self, candidate: Candidate) -> PrefetchSession:
        """The session of a worker; raises LostError if the worker is gone."""
        ...


class Prefetch:
    """One request's prefetches. At most one worker prefetches for it at a time."""

    def __init__(self, sessions: Sessions, request_id: RequestId) -> None:
        self._sessions = sessions
        self._request_id = request_id
        self._session: PrefetchSession | None = None

    def begin(self, candidate: Candidate, hashes: Sequence[BlockHash]) -> None:
        """Starts a prefetch at the worker that a plan names first, and ends one at another worker.

        Args:
            hashes: hashes of the leading blocks that it holds.
        """
        if self._session is not None and self._session.worker_id == candidate.worker_id:
            return
        self.end()
        source = candidate.source
        if not (candidate.host_tokens or candidate.disk_tokens):
            return
        if source is not None and source.before_load:
            return  # it fetches the prefix from another worker before it loads its own
        # Without a connection, the offer opens one, and the worker loads the blocks then.
        with contextlib.suppress(LostError):
            session = self._sessions.session(candidate)
            session.prefetch(self._request_id, hashes)
            self._session = session

    def taken(self, worker_id: WorkerId) -> None:
        """Notes that a worker computes the prompt; a prefetch at any other worker ends."""
        if self._session is not None and self._session.worker_id == worker_id:
            self._session = None
        self.end()

    def end(self) -> None:
        """Ends the prefetch, if there is one. May be called again."""
        session, self._session = self._session, None
        if session is not None:
            session.end_prefetch(self._request_id)
