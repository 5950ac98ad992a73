"""The receiving side of a worker's data plane: accepts connections and fills the target's blocks.

Listens for TCP and, where pools can be mapped, on a Unix socket; joins the process's hub. Handles
the frames of a connection in order. `ReceiverMachine` and the target make the decisions.
Tests: tests/contract/test_channels.py, tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.errors import LostError
from kvmesh.core.newcomers import Newcomers
from kvmesh.core.types import Endpoint, HostRoute, WorkerId
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.channel import DEFAULT_KINDS, IPC, LOCAL, NIXL, SHM, TCP
from kvmesh.transfer.device import DevicePool
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import Checksum, LinkTerms
from kvmesh.transfer.host import host_id
from kvmesh.transfer.host_socket import listen_on_host
from kvmesh.transfer.ipc_channel import ENGINE
from kvmesh.transfer.local_channel import PROCESS_HUB, LocalEnd, LocalHub
from kvmesh.transfer.memory import PoolMemory
from kvmesh.transfer.meters import (
    LinkKey,
    LinkMeter,
    LinkMeters,
    TransferObserver,
    TransferStatistics,
    unobserved,
)
from kvmesh.transfer.native import load_native
from kvmesh.transfer.nixl_reader import NixlReaders
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.protocol import ChannelIdentity, ReceiverMachine
from kvmesh.transfer.query_ops import QueryOps
from kvmesh.transfer.server_channel import ServerChannel
from kvmesh.transfer.server_state import ServerState
from kvmesh.transfer.sockets import listen, local_endpoint, suit_path
from kvmesh.transfer.staging import DEFAULT_STAGING_BYTES, StagingRing
from kvmesh.transfer.target import NothingToRead, ReadSource, WriteTarget
from kvmesh.transfer.tls import DataTls, WrongPeerError, accept_tls
from kvmesh.transfer.wire import Wire

log = event_logger(__name__)

Serve = Callable[[socket.socket], Coroutine[None, None, None]]

ACCEPT_PAUSE_S = 0.1
"""Seconds without accepting after a connection could not be accepted."""

_MAX_THREADS = 32


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """Settings of a worker's receiving side.

    Attributes:
        kinds: channel kinds that are offered.
        host: address to bind.
        port: port to bind; 0 takes a free one.
        checksum: minimum checksum of TCP payloads; a sender may also ask for one.
        window_bytes: payload bytes that one connection may send ahead of its answers.
        stall_timeout_s: seconds after which a connection is cut that has not sent a whole HELLO, or
            makes no progress within a frame.
        tls: wraps TCP connections.
        copy_threads: number of threads that share one large copy out of a mapped pool.
        poll_s: maximum seconds that the loop busy-polls for the next frame before it turns to other
            work, while that pays (`Polling`); 0 disables it.
        staging_bytes: bytes of host memory through which blocks of a device pool arrive; a larger
            frame is refused.
        egress: budget of the bytes that peers read over TCP, shared with sends; None for no limit.
    """

    kinds: tuple[str, ...] = DEFAULT_KINDS
    host: str = "127.0.0.1"
    port: int = 0
    checksum: Checksum = Checksum.NONE
    window_bytes: int = 64 << 20
    stall_timeout_s: float = 10.0
    tls: DataTls | None = None
    copy_threads: int = 1
    poll_s: float = 0.0
    staging_bytes: int = DEFAULT_STAGING_BYTES
    egress: Pacer | None = None


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Addresses of a server: its network address as bound, and its Unix socket within the host."""

    endpoint: Endpoint
    route: HostRoute | None


class DataServer:
    """Listens for workers that write KV into a target, or read it from a source."""

    def __init__(
        self,
        identity: ChannelIdentity,
        target: WriteTarget,
        options: ReceiveOptions | None = None,
        *,
        source: ReadSource | None = None,
        queries: QueryOps | None = None,
        memory: PoolMemory | None = None,
        hub: LocalHub = PROCESS_HUB,
        observer: TransferObserver = unobserved,
    ) -> None:
        """Opens nothing before `start`.

        Args:
            identity: this worker. Peers that name another worker, incarnation or layout are
                refused.
            target: receives KV writes.
            source: serves KV reads; None refuses all reads.
            queries: computes for other workers; None refuses all queries.
            memory: the pool that holds the granted blocks; NIXL and device pools need it.
            hub: receivers of this process.
            observer: called with every frame that filled its blocks.
        """
        self._identity = identity
        self._target = target
        self._source = source or NothingToRead()
        self._queries = queries
        self._options = options or ReceiveOptions()
        self._hub = hub
        self._observer = observer
        load_native()  # here, so that the first transfer does not pay for it
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "kv-receive")
        # A second pool: slow or paced readers must not delay arriving KV.
        self._senders = ThreadPoolExecutor(_MAX_THREADS, "kv-serve")
        self._answering: ThreadPoolExecutor | None = None
        self._listeners: list[socket.socket] = []
        self._host_path: Path | None = None
        self._local: LocalEnd | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._newcomers = Newcomers[asyncio.Task[None]](asyncio.Task.cancel)
        self._num_connections = Counter[WorkerId]()
        self._meters = LinkMeters(lambda: +self._num_connections)
        self._state = ServerState(copy_threads=self._options.copy_threads)
        if queries is not None:
            # A separate single thread: each computing thread has its own thread team of the
            # engine's size, and transfers must not wait for answers.
            self._state.answering = self._answering = ThreadPoolExecutor(1, "kv-answer")
        if IPC in self._options.kinds:
            self._state.pool = memory
        if isinstance(memory, DevicePool):
            size = self._options.staging_bytes
            self._state.staging = StagingRing(memory, identity.layout.block_bytes, size)
        if NIXL in self._options.kinds:
            self._state.readers = NixlReaders(memory, self._options.stall_timeout_s)

    async def start(self) -> DataAddress:
        """Starts to listen; returns the addresses.

        Raises:
            OSError: the address cannot be bound.
        """
        assert not self._listeners, "started once"
        options = self._options
        # Always on: peers without a faster channel use TCP, and it tells a peer which worker is
        # here.
        tcp = await listen(options.host, options.port)
        self._listen(tcp, self._serve_tcp)
        route = None
        if {SHM, IPC} & set(options.kinds) and (here := host_id()):
            route = self._listen_here(here)
        if LOCAL in options.kinds:
            loop = asyncio.get_running_loop()
            self._local = LocalEnd(
                self._identity, self._target, self._source, loop, self._state.staging
            )
            self._hub.join(self._local)
        return DataAddress(local_endpoint(tcp, options.host), route)

    async def close(self) -> None:
        """Cuts all connections; open grants end with `ok=False`. May be called again."""
        if self._local is not None:
            self._hub.leave(self._local)
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        if self._host_path is not None:
            with contextlib.suppress(OSError):
                self._host_path.unlink(missing_ok=True)
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        if self._state.readers is not None:
            await self._state.readers.close()
        self._threads.shutdown(wait=False)
        self._senders.shutdown(wait=False)
        if self._answering is not None:
            self._answering.shutdown(wait=False)
        if self._state.staging is not None:
            await self._state.staging.close()

    def statistics(self) -> TransferStatistics:
        """Returns the totals received over sockets."""
        return TransferStatistics(len(self._serving), self._meters.links)

    def _listen_here(self, here: str) -> HostRoute | None:
        """Listens for peers on this host; None if that fails and they must use the network."""
        try:
            listener, path = listen_on_host(here)
        except OSError as error:  # full, read-only, or a path that is too long for a socket
            log.warning("host_route_failed", error=str(error))
            return None
        self._host_path = path
        self._listen(listener, self._serve_unix)
        return HostRoute(here, str(path))

    def _listen(self, listener: socket.socket, serve: Serve) -> None:
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener, serve)

    def _accept(self, listener: socket.socket, serve: Serve) -> None:
        # In a callback: a task that is cancelled while it accepts may lose a connection.
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, or reset before it was taken
            log.warning("data_accept_failed", error=str(error))
            self._pause(listener, serve)
            return
        sock.setblocking(False)
        suit_path(sock)
        task = asyncio.get_running_loop().create_task(serve(sock))
        self._serving.add(task)
        self._newcomers.enter(task)
        task.add_done_callback(functools.partial(self._served, sock))

    def _pause(self, listener: socket.socket, serve: Serve) -> None:
        """Stops accepting for a moment: a pending connection would wake the loop at once."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        self._newcomers.cut_oldest()  # frees a descriptor if those are exhausted

        def go_on() -> None:
            if listener in self._listeners:
                loop.add_reader(listener.fileno(), self._accept, listener, serve)

        loop.call_later(ACCEPT_PAUSE_S, go_on)

    def _served(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        sock.close()  # a task that was cancelled before its first step has not done it
        self._serving.discard(task)
        self._newcomers.leave(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.failure("data_channel_crashed", error)

    async def _serve_tcp(self, sock: socket.socket) -> None:
        wire: Wire = sock
        if self._options.tls is not None:
            try:
                async with asyncio.timeout(self._options.stall_timeout_s):
                    wire = await accept_tls(sock, self._options.tls)
            except (LostError, TimeoutError) as error:
                # Anyone may connect without a certificate of the mesh: that deserves no warning.
                tell = log.warning if isinstance(error, WrongPeerError) else log.debug
                tell("data_channel_refused", error=str(error))
                return
        await self._serve(wire, TCP)

    async def _serve_unix(self, sock: socket.socket) -> None:
        await self._serve(sock, SHM)

    async def _serve(self, wire: Wire, kind: str) -> None:
        options = self._options
        frames = FrameSocket(
            wire,
            self._identity.layout.block_bytes,
            options.stall_timeout_s,
            self._threads,
            takes_fd=kind == SHM,
            poll_s=options.poll_s,
            senders=self._senders,
        )
        # A Unix socket stays within the machine: a checksum would only cost time.
        wish = Checksum.NONE if kind == SHM else options.checksum
        terms = LinkTerms(wish, options.window_bytes)
        ops = frozenset[int]() if self._queries is None else self._queries.ops
        machine = ReceiverMachine(self._identity, terms, ops)
        channel = ServerChannel(
            frames,
            machine,
            self._target,
            self._state,
            self._threads,
            self._source,
            options.stall_timeout_s,
            self._queries,
        )
        if kind == TCP:
            channel.pacer = options.egress
        cause = "closed"
        try:
            cause = await channel.serve(functools.partial(self._meter, kind))
        finally:
            channel.close()
            # Anyone may connect and say nothing: that deserves no log line above debug.
            tell = log.debug if machine.peer is None else log.info
            tell("data_channel_ended", peer=machine.peer, cause=cause)
            if machine.peer is not None:
                self._target.peer_lost(machine.peer)
            if channel.is_metered:
                assert machine.peer is not None, "greeted"
                self._num_connections[machine.peer] -= 1
                self._num_connections += Counter()  # keeps those above zero

    def _meter(
        self, kind: str, machine: ReceiverMachine
    ) -> tuple[LinkKey, LinkMeter, TransferObserver]:
        assert machine.peer is not None, "greeted"
        if (task := asyncio.current_task()) is not None:
            self._newcomers.leave(task)
        if machine.offer is not None and machine.offer.segment is not None:
            kind = IPC if machine.offer.segment.engine == ENGINE else NIXL
        self._num_connections[machine.peer] += 1
        key = LinkKey(machine.peer, kind, "received")
        return key, self._meters.of(key), self._observer
