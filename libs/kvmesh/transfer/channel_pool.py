"""The sending side of a worker's data plane: the best channel for each peer's incarnation.

Tests: tests/contract/test_channels.py, tests/integration/test_transfer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.peers import Peer
from kvmesh.core.types import Endpoint, HostRoute, Reservation, WorkerId
from kvmesh.policy.link import LinkView
from kvmesh.transfer.alignment import Run, tabled
from kvmesh.transfer.channel import DEFAULT_KINDS, IPC, LOCAL, NIXL, SHM, SendChannel, usable_kinds
from kvmesh.transfer.device import DevicePool, Moment, SharedPool
from kvmesh.transfer.frames import BlockPart, Checksum
from kvmesh.transfer.greeting import DEFAULT_PATIENCE_S, LaneOptions, Link, PeerKey, new_link_id
from kvmesh.transfer.host import host_id
from kvmesh.transfer.ipc_channel import IpcChannel
from kvmesh.transfer.local_channel import PROCESS_HUB, LocalChannel, LocalHub
from kvmesh.transfer.memory import MappablePool, PoolMemory
from kvmesh.transfer.meters import (
    LinkKey,
    LinkMeter,
    LinkMeters,
    TransferObserver,
    TransferSample,
    TransferStatistics,
    unobserved,
)
from kvmesh.transfer.native import load_native
from kvmesh.transfer.nixl_channel import NixlChannel, NixlOwner
from kvmesh.transfer.nixl_process import is_installed
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.run_table import num_blocks_of
from kvmesh.transfer.shm_channel import ShmChannel
from kvmesh.transfer.staging import DEFAULT_STAGING_BYTES, SendMemory, StagingRing
from kvmesh.transfer.stall import PaceWatch
from kvmesh.transfer.tcp_channel import TcpChannel, TcpOptions, give_up
from kvmesh.transfer.tls import DataTls

_MAX_THREADS = 32


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Settings of a worker's sending side.

    Attributes:
        kinds: channel kinds that may be used, in the order of preference.
        lanes: TCP connections per peer; 0 chooses by cores and by the measured gain of a change.
        checksum: checksum of TCP payloads; the receiver may also ask for one.
        budget_bytes_s: TCP bytes per second to one peer; 0 is no limit.
        egress_bytes_s: TCP bytes per second to all peers together, see `ChannelPool.egress`; 0 is
            no limit. Only one of both may be set.
        connect_timeout_s: seconds for a new connection, greeting included.
        stall_timeout_s: seconds without progress after which a transfer fails.
        patience_s: seconds. Transfers to a peer over TCP fail if, at the speed of the last
            `stall_timeout_s`, the rest of them would take longer than this.
        tls: wraps TCP connections.
        poll_s: maximum seconds that the loop busy-polls for an answer before it turns to other
            work, while that pays (`Polling`). It polls after a small frame was sent and nothing
            else is under way on the connection. 0 disables it.
        staging_bytes: bytes of host memory through which blocks of a device pool leave.
    """

    kinds: tuple[str, ...] = DEFAULT_KINDS
    lanes: int = 0
    checksum: Checksum = Checksum.CRC32C
    budget_bytes_s: float = 0.0
    egress_bytes_s: float = 0.0
    connect_timeout_s: float = 2.0
    stall_timeout_s: float = 10.0
    patience_s: float = DEFAULT_PATIENCE_S
    tls: DataTls | None = None
    poll_s: float = 0.0
    staging_bytes: int = DEFAULT_STAGING_BYTES


class _Address(NamedTuple):
    """Destination of a channel: a peer and its addresses."""

    peer: PeerKey
    endpoint: Endpoint
    route: HostRoute | None

    @classmethod
    def of(cls, reservation: Reservation) -> _Address:
        peer = PeerKey(reservation.worker_id, reservation.incarnation)
        return cls(peer, reservation.data_endpoint, reservation.host_route)


@dataclass(slots=True)
class _Slot:
    """Place of one peer's channel; the lock lets one caller open it while others wait."""

    key: LinkKey
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_callers: int = 0
    channel: SendChannel | None = None

    @property
    def is_open(self) -> bool:
        return self.channel is not None and self.channel.is_open


class ChannelPool:
    """Sends KV into reservations; opens one channel per incarnation of a peer and keeps it."""

    def __init__(
        self,
        identity: ChannelIdentity,
        memory: PoolMemory,
        options: SendOptions | None = None,
        *,
        hub: LocalHub = PROCESS_HUB,
        observer: TransferObserver = unobserved,
    ) -> None:
        """Opens nothing before the first call.

        Args:
            identity: this worker.
            memory: this worker's pool.
            hub: receivers of this process.
            observer: called with every transfer.
        """
        self._identity = identity
        self._block_bytes = identity.layout.block_bytes
        self._options = options or SendOptions()
        self._staging: StagingRing | None = None
        self._shared = memory if isinstance(memory, SharedPool) else None
        if isinstance(memory, DevicePool):
            size = self._options.staging_bytes
            self._staging = StagingRing(memory, self._block_bytes, size)
        self._memory: SendMemory = self._staging or memory
        self._hub = hub
        self._observer = observer
        self._host_id = host_id()
        self._slots: dict[_Address, _Slot] = {}
        self._meters = LinkMeters(self._peers)
        self._pacers: WeakValueDictionary[Endpoint, Pacer] = WeakValueDictionary()
        self._egress: Pacer | None = None
        self._leaving: PaceWatch | None = None
        if self._options.egress_bytes_s > 0:
            self._egress = egress = Pacer(self._options.egress_bytes_s, SystemClock())
            self._leaving = PaceWatch(
                self._options.stall_timeout_s,
                self._options.patience_s,
                lambda: egress.handed_bytes,
                lambda measured, excess: give_up(f"the budget is too small: {measured}", excess),
                lambda: egress.idle_s,
            )
        self._nixl: NixlOwner | None = None
        if NIXL in self._options.kinds and is_installed() and isinstance(memory, MappablePool):
            self._nixl = NixlOwner(memory)
        self._barren: set[tuple[PeerKey, str]] = set()
        load_native()  # here, so that the first transfer does not pay for it
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "kv-send")
        self._closed = False

    async def open(self, peer: Peer) -> None:
        """Opens the channel to a peer, greeting included, so that transfers find it open.

        Raises:
            RefusedError: the peer refused, for instance because of its secret or layout.
            LostError: no channel leads to the peer.
        """
        key = PeerKey(peer.worker_id, peer.incarnation)
        await self._channel(_Address(key, peer.data_endpoint, peer.host_route))

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """Writes blocks of this worker's pool into a reservation; returns when they are there.

        Any number of calls may run at once; they share the channel fairly. When this returns or
        raises, cancellation included, the blocks may be written again.

        Args:
            reservation: destination; its worker must be reachable at `data_endpoint`.
            runs: runs of `align_to_reservation`, at least one block.
            part: the bytes of each block to send, such as some layers; each block is then one call.
            after: moment of a device pool after which its blocks are read; None for the present.

        Raises:
            RefusedError: the receiver refused, with its refusal.
            LostError: the channel died or stalled; the content of the reservation's blocks is
                undefined.
        """
        runs = tabled(runs)
        num_blocks = num_blocks_of(runs)
        num_bytes = num_blocks * (self._block_bytes if part is None else part.size)
        num_calls = len(runs) if part is None else num_blocks
        assert num_bytes > 0, "nothing to send"
        channel, key = await self._channel(_Address.of(reservation))
        meter = self._meters.of(key)
        now = asyncio.get_running_loop().time
        started = now()
        meter.begin(num_bytes, started)
        try:
            await channel.put(reservation, runs, part, after)
        except RefusedError:
            meter.refused += 1
            raise
        except LostError:
            meter.lost += 1
            if isinstance(channel, NixlChannel | IpcChannel) and channel.is_barren:
                # The engines cannot reach each other: this incarnation of the peer gets another
                # kind.
                peer = PeerKey(reservation.worker_id, reservation.incarnation)
                self._barren.add((peer, key.channel))
            raise
        finally:
            meter.end(num_bytes, now())
        seconds = now() - started
        meter.bytes += num_bytes
        meter.calls += num_calls
        meter.seconds += seconds
        self._observer(TransferSample(key, num_bytes, num_calls, seconds))

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """Tells the receiver the first token; returns when it knows it.

        The receiver commits when all blocks of the reservation are there. So the handoff is
        complete when this and all `put` calls have returned, in any order.

        Args:
            reservation: its blocks have been written, are being written, or will be.
            first_token_id: the token that prefill sampled.
            num_tokens: positions with KV, the receiver's own cached prefix included.

        Raises:
            RefusedError: the receiver refused.
            LostError: the channel died or stalled. The receiver may or may not know the token;
                calling again is safe.
        """
        channel, key = await self._channel(_Address.of(reservation))
        try:
            await channel.commit(reservation, first_token_id, num_tokens)
        except RefusedError:
            self._meters.of(key).refused += 1
            raise
        except LostError:
            self._meters.of(key).lost += 1
            raise

    async def close(self) -> None:
        """Ends all channels; transfers under way get LostError. May be called again."""
        self._closed = True
        slots = list(self._slots.values())
        self._slots.clear()
        for slot in slots:
            async with slot.opening:
                if slot.channel is not None:
                    await slot.channel.close()
        if self._leaving is not None:
            self._leaving.close()
        if self._nixl is not None:
            await self._nixl.close()
        self._threads.shutdown(wait=False)
        if self._staging is not None:
            await self._staging.close()

    def statistics(self) -> TransferStatistics:
        """Returns the totals sent; reads round trips and retransmits from the kernel now."""
        num_open = 0
        for slot in self._slots.values():
            if slot.channel is None:
                continue
            num_open += slot.channel.num_connections
            if isinstance(slot.channel, TcpChannel):
                slot.channel.read_facts(self._meters.of(slot.key))
        return TransferStatistics(num_open, self._meters.links)

    @property
    def staging(self) -> StagingRing | None:
        """Staging memory of a device pool; readers of peers' blocks may use it for landing them."""
        return self._staging

    @property
    def egress(self) -> Pacer | None:
        """Budget of all bytes that leave this worker, to be shared with reads by peers."""
        return self._egress

    @property
    def sent_bytes(self) -> int:
        """KV bytes that arrived at peers since start."""
        return self._meters.bytes

    @property
    def sending_bytes(self) -> int:
        """KV bytes of requested transfers that have not arrived."""
        links = self._meters.links.values()
        return sum(meter.queued_bytes - meter.arrived_bytes for meter in links)

    @property
    def sending_s(self) -> float:
        """Seconds since start with KV on its way over TCP. Never falls."""
        return self._meters.leaving.seconds(SystemClock().now())

    def link_view(self, reservation: Reservation) -> LinkView | None:
        """Returns the link that a transfer would take now; None before the first one."""
        for address, slot in self._slots.items():
            if slot.is_open and address.peer.worker_id == reservation.worker_id:
                return self._meters.of(slot.key).view(slot.key)
        return None

    def _peers(self) -> set[WorkerId]:
        """Returns the workers with an open channel, or with one that is being opened."""
        return {
            address.peer.worker_id
            for address, slot in self._slots.items()
            if slot.is_open or slot.num_callers > 0
        }

    async def _channel(self, address: _Address) -> tuple[SendChannel, LinkKey]:
        slot = self._slots.get(address)
        if slot is not None and slot.is_open:
            assert slot.channel is not None
            return slot.channel, slot.key
        if slot is None:
            # Peers come back with new incarnations: forget the channels that ended.
            for key in [k for k, s in self._slots.items() if not s.is_open and not s.num_callers]:
                del self._slots[key]
            slot = self._slots[address] = _Slot(LinkKey(address.peer.worker_id, "", "sent"))
        slot.num_callers += 1
        try:
            async with slot.opening:
                if self._closed:
                    raise LostError("data channels are closed")
                if not slot.is_open:
                    await self._open_best(slot, address)
                assert slot.channel is not None
                return slot.channel, slot.key
        finally:
            slot.num_callers -= 1

    async def _open_best(self, slot: _Slot, address: _Address) -> None:
        """Opens the first kind that works; stops if the peer refuses."""
        if slot.channel is not None:
            await slot.channel.close()
        kinds = usable_kinds(
            self._options.kinds,
            same_process=self._hub.find(address.peer) is not None,
            has_memfd=isinstance(self._memory, MappablePool),
            has_ipc=self._shared is not None and (address.peer, IPC) not in self._barren,
            has_nixl=self._nixl is not None and (address.peer, NIXL) not in self._barren,
            here=self._host_id,
            there=address.route,
        )
        failure = LostError(f"no channel of {', '.join(self._options.kinds)} leads to the peer")
        for kind in kinds:
            meter = self._meters.of(LinkKey(address.peer.worker_id, kind, "sent"))
            try:
                slot.channel = await self._open(kind, address, meter)
            except LostError as error:
                failure = error
                continue
            slot.key = LinkKey(address.peer.worker_id, kind, "sent")
            return
        raise failure

    async def _open(self, kind: str, address: _Address, meter: LinkMeter) -> SendChannel:
        options, memory = self._options, self._memory
        link = Link(self._identity, address.peer, new_link_id(), meter, self._threads)
        lane = LaneOptions(
            options.connect_timeout_s,
            options.stall_timeout_s,
            self._pacer(address.endpoint),
            options.poll_s,
            is_staged=self._staging is not None,
            patience_s=options.patience_s,
        )
        if kind == LOCAL:
            end = self._hub.find(link.peer)
            if end is None:
                raise LostError(f"{link.peer.worker_id} has left this process")
            return LocalChannel(link, end, self._hub, memory)
        if kind == IPC:
            assert address.route is not None, "usable on the same host only"
            assert self._shared is not None, "usable with a device only"
            return await IpcChannel.open(link, address.route, lane, self._shared)
        if kind == SHM:
            assert address.route is not None, "usable on the same host only"
            return await ShmChannel.open(link, address.route, lane, memory)
        tcp = TcpOptions(lane, options.lanes, options.checksum, options.tls)
        if kind == NIXL:
            assert self._nixl is not None, "usable with the engine only"
            return await NixlChannel.open(link, address.endpoint, tcp, self._nixl)
        channel = TcpChannel(link, address.endpoint, tcp, memory, self._leaving)
        await channel.open()
        return channel

    def _pacer(self, endpoint: Endpoint) -> Pacer | None:
        if self._egress is not None:
            return self._egress
        if self._options.budget_bytes_s <= 0:
            return None
        # All incarnations of a peer at one endpoint share a budget, which lives as long as a
        # channel.
        pacer = self._pacers.get(endpoint)
        if pacer is None:
            pacer = self._pacers[endpoint] = Pacer(self._options.budget_bytes_s, SystemClock())
        return pacer
