"""Connects a worker to the peers to which it may have to send KV, before the first request.

It opens the channels that handoffs use, so the first handoff finds one open, and a firewall, a
wrong address, another secret or another layout is found before a request fails.
Tests: tests/unit/runtime/test_peer_connector.py, tests/e2e/test_connecting_groups.py.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.peers import Peer, PeerCheck, PeerReport
from kvmesh.core.types import HostRoute, WorkerId
from kvmesh.telemetry.logs import event_logger

MAX_AT_ONCE = 4
"""Connections that are opened at once, so that a large group does not start with a storm."""

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 5.0
"""Bounds in seconds of the pause between two tries of a peer."""

TRY_S = 8.0
"""Maximum number of seconds of one try. Channels have shorter limits for each of their steps."""

MAX_KEPT = 1024
"""Maximum number of results of peers that no scheduler names any more."""

log = event_logger(__name__)


class PeerConnector:
    """Tries the peers that schedulers name until each is connected.

    Args:
        me: this worker. Workers try their peers in different orders.
        open_channel: opens the channel to a peer; raises `RefusedError` or `LostError`.
        on_change: called when there is a new result.

    Attributes:
        host_route: how peers on this host reach this worker.
    """

    def __init__(
        self,
        me: WorkerId,
        open_channel: Callable[[Peer], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._me = me
        self._open = open_channel
        self._on_change = on_change
        self.host_route: HostRoute | None = None
        self._named: dict[str, tuple[Peer, ...]] = {}
        self._wanted: set[Peer] = set()
        self._problems: dict[WorkerId, tuple[Peer, str]] = {}
        self._trying: dict[Peer, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._wake = asyncio.Event()

    def name(self, scheduler: str, peers: tuple[Peer, ...]) -> None:
        """Takes the peers that a scheduler names, in place of those that it named before."""
        self._named[scheduler] = peers
        self._wanted = {peer for each in self._named.values() for peer in each}
        self._wake.set()

    def report(self) -> PeerReport:
        """The results so far.

        Those of connected peers are kept when a scheduler no longer names them: one that has just
        started does not know all workers yet.
        """
        checks = (
            PeerCheck(peer.worker_id, peer.incarnation, problem)
            for peer, problem in self._problems.values()
        )
        return PeerReport(self.host_route, tuple(checks))

    async def run(self) -> None:
        """Connects until cancelled."""
        try:
            while True:
                self._wake.clear()
                self._follow()
                await self._wake.wait()
        finally:
            for task in self._trying.values():
                task.cancel()
            await asyncio.gather(*self._trying.values(), return_exceptions=True)

    def _follow(self) -> None:
        """Starts to try new peers, and forgets those that are gone."""
        for peer in [each for each in self._trying if each not in self._wanted]:
            self._trying.pop(peer).cancel()
        unnamed = [each for each in self._problems.values() if each[0] not in self._wanted]
        for number, (peer, problem) in enumerate(unnamed):
            if problem or number < len(unnamed) - MAX_KEPT:
                del self._problems[peer.worker_id]
        for peer in sorted(self._wanted, key=self._turn):
            if peer not in self._trying and self._problem(peer) != "":
                task = asyncio.create_task(self._try(peer), name=f"connect to {peer.worker_id}")
                self._trying[peer] = task

    def _turn(self, peer: Peer) -> tuple[int, str]:
        return zlib.crc32(f"{self._me} {peer.worker_id}".encode()), peer.worker_id

    def _problem(self, peer: Peer) -> str | None:
        """The last result of a peer; None if there is none."""
        found, problem = self._problems.get(peer.worker_id, (None, ""))
        return problem if found == peer else None

    async def _try(self, peer: Peer) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            async with self._places:
                problem = await self._tried(peer)
            if problem != self._problem(peer):
                self._problems[peer.worker_id] = (peer, problem)
                self._on_change()
                if problem:
                    log.warning("peer_not_reached", peer=peer.worker_id, problem=problem)
            if not problem:
                del self._trying[peer]
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _tried(self, peer: Peer) -> str:
        """Connects to a peer. Returns why it failed; empty if it did not."""
        where = str(peer.data_endpoint)
        try:
            async with asyncio.timeout(TRY_S):
                await self._open(peer)
        except TimeoutError:
            return f"{where}: not connected within {TRY_S:g} s"
        except (RefusedError, LostError) as error:
            problem = str(error)
            return problem if where in problem else f"{where}: {problem}"
        return ""
