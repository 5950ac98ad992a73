"""TCP to one peer: several connections, pieces of a transfer striped over them.

If a connection is cut, its piece continues on another one, so a transfer resumes after its last
acknowledged piece. Tests: tests/contract/test_channels.py,
tests/integration/test_transfer_failures.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.core.clock import SystemClock
from kvmesh.core.cores import usable_cores
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, RefusalReason, Reservation
from kvmesh.transfer.alignment import Run, split_runs
from kvmesh.transfer.channel import carry_all
from kvmesh.transfer.device import Moment
from kvmesh.transfer.frames import MAX_RUNS, BlockPart, Checksum, LinkOffer
from kvmesh.transfer.greeting import LaneOptions, Link, sender_machine
from kvmesh.transfer.lane import Lane, claim_of
from kvmesh.transfer.lane_width import MEASURED_BYTES, LaneWidth
from kvmesh.transfer.memory import run_views
from kvmesh.transfer.meters import LinkMeter
from kvmesh.transfer.run_table import num_blocks_of
from kvmesh.transfer.sending_socket import INLINE_BYTES
from kvmesh.transfer.sockets import tcp_facts
from kvmesh.transfer.staging import SendMemory, StagingRing
from kvmesh.transfer.stall import PaceWatch, Rest
from kvmesh.transfer.tls import DataTls, connect_wire
from kvmesh.transfer.wire import Wire

MIN_PIECE_BYTES = 1 << 20
MAX_PIECE_BYTES = 16 << 20
"""Maximum payload bytes of one PUT, unless one block is larger."""
_DEPTH = 2
"""Pieces of one transfer on a lane at once: one is sent while the other awaits its answer."""
_MAX_TRIES = 4
_BUSY_RETRY_S = 0.005
_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Settings of a TCP channel.

    Attributes:
        lanes: connections per peer; 0 chooses by cores and by the measured gain of a change.
        checksum: checksum that this end asks for.
        tls: wraps each connection; None for plain TCP.
    """

    lane: LaneOptions
    lanes: int = 0
    checksum: Checksum = Checksum.CRC32C
    tls: DataTls | None = None


def even_blocks(num_blocks: int, block_bytes: int, lanes: int, most_bytes: int) -> int:
    """Returns the blocks of one PUT: equal shares of all connections, in as few PUTs as allowed.

    Each PUT costs two thread switches at both ends.

    Args:
        num_blocks: number of blocks of the transfer; at least 1.
        most_bytes: maximum bytes of one PUT, unless one block is larger.
    """
    most = max(1, most_bytes // block_bytes)
    rounds = -(-num_blocks // (lanes * most))
    share = -(-num_blocks // (lanes * rounds))
    return max(share, min(most, MIN_PIECE_BYTES // block_bytes))


def give_up(cause: str, excess: Sequence[Rest]) -> None:
    """Stops these transfers before their next piece; an earlier cause stays."""
    for rest in excess:
        rest.given_up = rest.given_up or cause


class _Progress:
    """The rest of a transfer, and the time of its last progress; shared by its pieces."""

    def __init__(self, rest: Rest) -> None:
        self.rest = rest
        self._loop = asyncio.get_running_loop()
        self.advance()

    def advance(self) -> None:
        self._at = self._loop.time()

    def silent_s(self) -> float:
        return self._loop.time() - self._at


class _Turn(NamedTuple):
    """Facts at the start of a transfer.

    Attributes:
        lanes: number of connections that it is spread over.
        is_measured: whether it is large and was alone at its start.
        number: number of transfers so far, this one included.
        channels: number of connections opened so far.
    """

    lanes: int
    is_measured: bool
    number: int
    channels: int
    started: float


@dataclass(slots=True)
class _Opening:
    """Opening of one connection: one caller tries, and callers that wait share its failure."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tries: int = 0
    failure: str = ""


class TcpChannel:
    """All connections to one incarnation of a peer at one address."""

    def __init__(
        self,
        link: Link,
        endpoint: Endpoint,
        options: TcpOptions,
        memory: SendMemory,
        egress: PaceWatch | None = None,
    ) -> None:
        """Use `open`.

        Args:
            egress: watches all bytes within a budget that other links share; None if the link has
                no budget, or one of its own.
        """
        self._link = link
        self._endpoint = endpoint
        self._options = options
        self._memory = memory
        self._meter = link.meter
        self._width = LaneWidth.of(options.lanes, usable_cores())
        self._lanes: list[Lane | None] = [None] * self._width.most
        self._opening = [_Opening() for _ in range(self._width.most)]
        self._num_begun = self._num_under_way = 0
        self._closed = False
        self._lost_bytes, self._lost_s = 0, 0.0  # of connections that were replaced
        self._egress = egress
        lane = options.lane
        self._pace = PaceWatch(
            lane.stall_timeout_s,
            lane.patience_s,
            self._moved_bytes,
            self._give_up,
            # A budget that other links share has a watch of its own, which sees all of them.
            self._held_back_s if egress is not None else lambda: 0.0,
        )

    async def open(self) -> None:
        """Opens the first connection; large transfers open the others.

        Raises:
            RefusedError, LostError: as `Lane.open`.
        """
        await self._lane(0)

    @property
    def is_open(self) -> bool:
        """Whether a connection is open."""
        return not self._closed and self.num_connections > 0

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return sum(lane is not None and lane.is_open for lane in self._lanes)

    def lanes(self) -> list[Lane]:
        """Returns the open connections."""
        return [lane for lane in self._lanes if lane is not None and lane.is_open]

    def read_facts(self, meter: LinkMeter) -> None:
        """Reads round trip and retransmits of the open connections from the kernel."""
        facts = [tcp_facts(lane.wire) for lane in self.lanes()]
        known = [fact for fact in facts if fact is not None]
        if known:
            meter.rtt_s = min(fact.rtt_s for fact in known)
            meter.retransmits = sum(fact.retransmits for fact in known)

    async def put(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        part: BlockPart | None = None,
        after: Moment = None,
    ) -> None:
        """See `SendChannel.put`."""
        block_bytes = self._link.identity.layout.block_bytes if part is None else part.size
        num_blocks = num_blocks_of(runs)
        total = num_blocks * block_bytes
        turn = self._begun(total)
        pieces = split_runs(runs, self._piece_blocks(num_blocks, block_bytes, turn.lanes), MAX_RUNS)
        progress = _Progress(Rest(total))
        memory, width = self._memory, min(len(pieces), turn.lanes)
        if after is None and isinstance(memory, StagingRing):
            after = memory.moment()

        async def send(piece: Sequence[Run], views: Sequence[memoryview]) -> None:
            # Time in which a device computes or copies the blocks does not count as leaving.
            self._meter.leaving.begin(_CLOCK.now())
            try:
                await self._send(reservation, piece, views, part, progress, width)
            finally:
                self._meter.leaving.end(_CLOCK.now())

        async def carry(piece: Sequence[Run]) -> None:
            if isinstance(memory, StagingRing):
                async with memory.views(piece, part, after, self) as views:
                    await send(piece, views)
            else:
                whole = self._link.identity.layout.block_bytes
                await send(piece, run_views(memory, piece, whole, part))
            piece_bytes = num_blocks_of(piece) * block_bytes
            progress.rest.num_bytes -= piece_bytes
            self._meter.arrived_bytes += piece_bytes

        watches = [self._pace] if self._egress is None else [self._pace, self._egress]
        for watch in watches:
            watch.begin(progress.rest)
        is_whole = False
        try:
            if total <= INLINE_BYTES:
                await carry(pieces[0])
            else:
                await carry_all(pieces, carry, turn.lanes * _DEPTH)
            is_whole = True
            self._measured(turn, total)
        finally:
            self._num_under_way -= 1
            for watch in watches:
                watch.end(progress.rest)
            arrived = total - progress.rest.num_bytes
            self._meter.arrived_bytes -= arrived
            self._meter.cut_off_bytes += 0 if is_whole else arrived

    async def commit(self, reservation: Reservation, first_token_id: int, num_tokens: int) -> None:
        """See `SendChannel.commit`. Tries once more if its connection is cut."""
        claim = claim_of(reservation)
        lane = await self._any_lane(1)
        try:
            await lane.commit(claim, first_token_id, num_tokens, reservation.num_blocks)
        except LostError:
            if self._closed or not self.is_open:
                raise
            lane = await self._any_lane(1)
            await lane.commit(claim, first_token_id, num_tokens, reservation.num_blocks)

    async def close(self) -> None:
        """See `SendChannel.close`."""
        self._closed = True
        self._pace.close()
        for lane in self._lanes:
            if lane is not None:
                await lane.close()

    async def _send(
        self,
        reservation: Reservation,
        runs: Sequence[Run],
        views: Sequence[memoryview],
        part: BlockPart | None,
        progress: _Progress,
        width: int,
    ) -> None:
        """Sends one piece, on another connection if one is cut."""
        claim = claim_of(reservation)
        tries = 0
        while True:
            lane = await self._any_lane(width)
            try:
                await lane.put(claim, runs, views, part, progress.rest)
                progress.advance()
                return
            except LostError:
                tries += 1
                silent = progress.silent_s() >= self._options.lane.stall_timeout_s
                if self._closed or silent or tries == _MAX_TRIES:
                    raise
                progress.rest.check()
                self._meter.resumed += 1
            except RefusedError as error:
                # The receiver has not yet noticed the end of the connection that was cut.
                is_old_writer = tries > 0 and error.refusal.reason is RefusalReason.BUSY
                if not is_old_writer or progress.silent_s() >= self._options.lane.stall_timeout_s:
                    raise
                await asyncio.sleep(_BUSY_RETRY_S)

    def _moved_bytes(self) -> int:
        return self._lost_bytes + sum(lane.moved_bytes for lane in self._lanes if lane is not None)

    def _held_back_s(self) -> float:
        return self._lost_s + sum(lane.held_back_s for lane in self._lanes if lane is not None)

    def _give_up(self, measured: str, excess: Sequence[Rest]) -> None:
        """Gives up transfers that a slow link cannot finish in time, for the sake of the others.

        If other transfers go on, these stop at their next turn. Otherwise the connections are cut,
        since no other transfer needs them.
        """
        give_up(f"the link is too slow: {measured}", excess)
        if not self._pace.num_going_on:
            for lane in self.lanes():
                lane.cut(excess[0].given_up)

    async def _any_lane(self, width: int) -> Lane:
        """Returns the least busy of the first `width` connections; opens it if necessary."""
        if self._closed:
            raise LostError("data channels are closed")
        index = 0
        if width > 1:
            index = min(range(width), key=self._load)
        lane = self._lanes[index]
        if lane is not None and lane.is_open:
            return lane
        try:
            return await self._lane(index)
        except LostError:
            others = self.lanes()
            if not others:
                raise
            return min(others, key=lambda lane: lane.unanswered_bytes)

    def _begun(self, num_bytes: int) -> _Turn:
        """Registers a new transfer; if large and alone, it may try another width."""
        is_measured = num_bytes >= MEASURED_BYTES and self._num_under_way == 0
        self._num_begun += 1
        self._num_under_way += 1
        lanes = self._width.next() if is_measured else self._width.now
        return _Turn(lanes, is_measured, self._num_begun, self._meter.channels, _CLOCK.now())

    def _measured(self, turn: _Turn, num_bytes: int) -> None:
        """Records the rate of a successful transfer that stayed alone and opened no connection."""
        is_alone = turn.number == self._num_begun and turn.channels == self._meter.channels
        if turn.is_measured and is_alone:
            seconds = max(_CLOCK.now() - turn.started, 1e-9)
            self._width.saw(turn.lanes, num_bytes / seconds)

    def _piece_blocks(self, num_blocks: int, block_bytes: int, lanes: int) -> int:
        """Returns the blocks of one PUT, so that several are answered within the stall time.

        The sender sees no progress in bytes that a slow link has buffered.
        """
        patience_s = self._options.lane.stall_timeout_s / (4 * lanes * _DEPTH)
        patient = int(self._meter.goodput_bytes_s * patience_s)
        most = min(MAX_PIECE_BYTES, max(patient, MIN_PIECE_BYTES))
        if isinstance(self._memory, StagingRing):
            most = min(most, self._memory.piece_bytes)
        return even_blocks(num_blocks, block_bytes, lanes, most)

    def _load(self, index: int) -> int:
        lane = self._lanes[index]
        if lane is None:
            return 0
        # A lost connection comes first: its successor ends what the receiver still holds of it.
        return lane.unanswered_bytes if lane.is_open else -1

    async def _lane(self, index: int) -> Lane:
        opening = self._opening[index]
        tries = opening.tries
        async with opening.lock:
            lane = self._lanes[index]
            if lane is not None and lane.is_open:
                return lane
            if self._closed:
                raise LostError("data channels are closed")
            if opening.tries != tries and opening.failure:
                raise LostError(opening.failure)  # the awaited attempt's failure
            opening.tries += 1
            offer = LinkOffer(self._link.link_id, index, self._options.checksum)
            machine = sender_machine(self._link.identity, self._link.peer, offer)
            try:
                lane = await Lane.open(
                    self._connect, machine, self._options.lane, self._meter, self._link.threads
                )
            except LostError as error:
                opening.failure = str(error)
                raise
            opening.failure = ""
            if self._closed:
                await lane.close()
                raise LostError("data channels are closed")
            if (old := self._lanes[index]) is not None:
                self._lost_bytes += old.moved_bytes
                self._lost_s += old.held_back_s
            self._lanes[index] = lane
            return lane

    async def _connect(self) -> Wire:
        return await connect_wire(self._endpoint, self._options.tls)
