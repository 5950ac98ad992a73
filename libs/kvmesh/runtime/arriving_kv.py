"""KV that arrives at a decode worker: its open reservations, and the writers into their blocks.

The handoff's rules are in `kv/handoff.py`; this module gives them a clock, memory and peers.
Tests: tests/integration/test_worker.py, tests/integration/test_layered_handoff.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

from kvmesh.core.types import (
    Endpoint,
    HostRoute,
    Refusal,
    RefusalReason,
    Reservation,
    WorkerId,
)
from kvmesh.kv.block_parts import Part
from kvmesh.kv.handoff import HandoffTable
from kvmesh.kv.handoff_types import AllWritten, BlockGrant, Committed, WriteClaim
from kvmesh.kv.runs import consecutive_runs
from kvmesh.runtime.decode_task import DecodeTask
from kvmesh.runtime.part_arrival import PartArrival
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.device import DevicePool, pieces_of
from kvmesh.transfer.frames import CommitFrame, PutFrame
from kvmesh.transfer.lane import claim_of
from kvmesh.transfer.memory import write_views
from kvmesh.transfer.run_table import indexes_of, runs_of_blocks
from kvmesh.transfer.target import AlreadyThere, WriteGrant

log = event_logger(__name__)


class ArrivingKv:
    """Receives KV (`transfer.target.WriteTarget`) into the blocks of reservations.

    Attributes:
        data_endpoint: address to which senders write; set when the data server listens.
        host_route: the faster route for senders on this host.
    """

    def __init__(
        self, parts: WorkerParts, lease_s: float, on_taken: Callable[[DecodeTask], None]
    ) -> None:
        """Starts without reservations.

        Args:
            lease_s: seconds without progress or renewal after which a reservation ends.
            on_taken: called when a handoff is complete and the task owns the blocks, before it
                decodes.
        """
        self._identity = parts.identity
        self._core = parts.core
        self._memory = parts.memory
        self._clock = parts.clock
        self._wake_engine = parts.wake_engine
        self._lease_s = lease_s
        self._on_taken = on_taken
        self._block_bytes = parts.core.spec.layout.block_bytes
        self._handoff = HandoffTable(parts.identity.incarnation, lease_s, self._block_bytes)
        self._by_reservation: dict[int, DecodeTask] = {}
        # Reservations that this worker ended, but whose blocks a writer may still use.
        self._fenced: dict[int, Callable[[], None]] = {}
        self._parts: dict[int, PartArrival] = {}
        self._grants: dict[WriteGrant, int] = {}
        self.data_endpoint: Endpoint | None = None
        self.host_route: HostRoute | None = None

    @property
    def num_open(self) -> int:
        """Number of requests that wait for their KV."""
        return len(self._by_reservation)

    @property
    def is_idle(self) -> bool:
        """Whether no reservation and no write is left."""
        return not (self._fenced or self._grants) and self._handoff.is_idle

    # --- reservations ------------------------------------------------------------------------

    def reserve(self, task: DecodeTask) -> Reservation:
        """Opens the task's blocks to any sender that presents the reservation."""
        num_cached_blocks = task.sequence.num_cached // self._core.block_size
        reservation = self._open(task, num_cached_blocks)
        self._by_reservation[reservation.reservation_id] = task
        return reservation

    def reserve_part(self, part: PartArrival) -> Reservation:
        """Like `reserve`, for a part of a prompt whose rest this worker computes.

        It ends when the whole part has arrived, or when nothing arrives for the length of the
        lease.
        """
        reservation = self._open(part, part.num_cached_blocks)
        self._parts[reservation.reservation_id] = part
        return reservation

    def _open(self, waiting: DecodeTask | PartArrival, num_cached_blocks: int) -> Reservation:
        capability = secrets.token_bytes(16)
        assert self.data_endpoint is not None, "the data server is not up"
        reservation_id = self._handoff.reserve(
            waiting.request_id,
            waiting.arriving,
            0,  # `arriving` excludes cached blocks
            capability,
            waiting.attempt,
            self._clock.now(),
        )
        waiting.reservation_id = reservation_id
        return Reservation(
            reservation_id=reservation_id,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            generation=waiting.attempt,
            capability=capability,
            data_endpoint=self.data_endpoint,
            num_cached_blocks=num_cached_blocks,
            num_blocks=len(waiting.arriving),
            lease_ms=int(self._lease_s * 1000),
            host_route=self.host_route,
            run_lengths=tuple(count for _, count in consecutive_runs(waiting.arriving)),
        )

    def renew(self, task: DecodeTask) -> None:
        """Restarts the task's lease, if its KV has not arrived yet."""
        if task.reservation_id is not None:
            self._handoff.renew(task.reservation_id, self._clock.now())

    def cancel(self, task: DecodeTask) -> None:
        """Ends the task's reservation. Its blocks become free when no writer uses them any more."""
        assert task.reservation_id is not None, "decode has taken the blocks over"
        self._fence(task.reservation_id)
        self._handoff.cancel(task.reservation_id)
        if task.local_write is not None:
            if task.stop_prefill is not None:
                task.stop_prefill()
            # The engine is this writer; it no longer uses the blocks when `release` frees them.
            self._core.release(task.sequence)
            self._handoff.end_write(task.local_write, False, self._clock.now())
            task.sequence.on_progress()  # the prefill side waits for a first token
        self._release_quiet()

    def cancel_part(self, part: PartArrival) -> None:
        """Ends the reservation of a part; `on_quiet` is called when no writer uses its blocks."""
        assert part.reservation_id is not None, "all of it has come, or it has ended"
        reservation_id, part.reservation_id = part.reservation_id, None
        self._fenced[reservation_id] = self._parts.pop(reservation_id).on_quiet
        self._handoff.cancel(reservation_id)
        self._release_quiet()

    def _came(self, part: PartArrival, claim: WriteClaim) -> None:
        """Commits and takes a part that has arrived completely; its writer may still commit."""
        outcome = self._handoff.commit(claim, self._clock.now())
        if not isinstance(outcome, Committed):  # a write is still open although all has arrived
            self.cancel_part(part)
            return
        taken = self._handoff.take(claim.reservation_id)
        assert not isinstance(taken, Refusal), taken
        del self._parts[claim.reservation_id]
        part.reservation_id = None
        part.on_quiet()

    def expire(self) -> list[DecodeTask]:
        """Fences the reservations whose lease ran out; the caller ends their tasks."""
        before = list(self._by_reservation.items())
        if not self._handoff.expire(self._clock.now()):
            return []
        ended = [(number, task) for number, task in before if not self._handoff.is_open(number)]
        # Fence all of them first: ending one releases all blocks without writers, also those of
        # others.
        for reservation_id, _ in ended:
            self._fence(reservation_id)
        for reservation_id, part in list(self._parts.items()):
            if not self._handoff.is_open(reservation_id):
                log.warning("part_expired", request_id=part.request_id)
                self._fenced[reservation_id] = self._parts.pop(reservation_id).on_quiet
                part.reservation_id = None
                part.gate.close()
        if not ended:
            self._release_quiet()
        return [task for _, task in ended]

    def _fence(self, reservation_id: int) -> None:
        task = self._by_reservation.pop(reservation_id, None)
        if task is not None:
            self._fenced[reservation_id] = partial(self._core.release, task.sequence)

    def _release_quiet(self) -> None:
        """Frees the blocks of ended reservations that no writer uses any more."""
        for released in self._handoff.drain_released():
            self._fenced.pop(released.reservation_id)()

    def _take(self, task: DecodeTask) -> None:
        assert task.reservation_id is not None
        taken = self._handoff.take(task.reservation_id)
        assert not isinstance(taken, Refusal), taken
        del self._by_reservation[task.reservation_id]
        task.reservation_id = None
        self._on_taken(task)

    # --- KV from other workers (WriteTarget) -------------------------------------------------

    def begin_write(self, put: PutFrame) -> WriteGrant | AlreadyThere | Refusal:
        """Returns the memory for the runs of a PUT, if the handoff table admits it."""
        now = self._clock.now()
        refusal = self._handoff.check_claim(put.claim, now)
        if refusal is not None:
            return refusal
        reservation_id = put.claim.reservation_id
        upstream = self._parts.get(reservation_id)
        waiting = upstream or self._by_reservation.get(reservation_id)
        indexes = indexes_of(put.runs, 1 if waiting is None else len(waiting.arriving))
        if upstream is not None and not upstream.may_write(indexes, put.part):
            return Refusal(RefusalReason.STALE, "these layers have come, and may be in use")
        part = None if put.part is None else Part(*put.part)
        granted = self._handoff.begin_write(put.claim, indexes, now, part)
        if isinstance(granted, Refusal):
            return granted
        if isinstance(granted, AllWritten):
            return AlreadyThere()
        runs = runs_of_blocks(granted.blocks)
        if isinstance(self._memory, DevicePool):
            grant = WriteGrant(put, (), pieces_of(runs, self._block_bytes, put.part))
        else:
            views = write_views(self._memory, runs, self._block_bytes, put.part)
            grant = WriteGrant(put, views)
        self._grants[grant] = granted.write_id
        return grant

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        """Notes that the channel no longer uses the memory.

        Starts decoding if these were the last blocks and the sender has committed.
        """
        committed = self._handoff.end_write(self._grants.pop(grant), ok, self._clock.now())
        reservation_id = grant.put.claim.reservation_id
        if committed is not None and reservation_id in self._by_reservation:
            self._start(self._by_reservation[reservation_id])
        part = self._parts.get(reservation_id)
        if part is not None and ok:
            part.wrote(indexes_of(grant.put.runs, len(part.arriving)), grant.put.part)
            if part.is_complete:
                self._came(part, grant.put.claim)
        self._release_quiet()

    def commit(self, frame: CommitFrame) -> Refusal | None:
        """Starts decoding when all blocks are there. A repeated commit gets the same answer."""
        task = self._by_reservation.get(frame.claim.reservation_id)
        if task is not None and not 0 <= frame.first_token_id < self._core.spec.vocab_size:
            text = f"first token {frame.first_token_id} is outside the vocabulary"
            return Refusal(RefusalReason.INVALID, text)
        outcome = self._handoff.commit(frame.claim, self._clock.now())
        if isinstance(outcome, Refusal):
            return outcome
        if task is not None:
            task.first_token_id = frame.first_token_id
            if isinstance(outcome, Committed):
                self._start(task)
        return None

    def _start(self, task: DecodeTask) -> None:
        assert task.first_token_id is not None, "its sender has committed"
        self._take(task)
        self._core.start_decode(task.sequence, task.first_token_id)
        self._wake_engine()

    def claimed_blocks(self, claim: WriteClaim) -> list[int] | Refusal:
        """The blocks that a reservation found cached here, for queries about them."""
        refusal = self._handoff.check_claim(claim, self._clock.now())
        if refusal is not None:
            return refusal
        task = self._by_reservation.get(claim.reservation_id)
        if task is None:
            return Refusal(RefusalReason.STALE, "decode has taken the blocks over")
        return task.sequence.blocks[: task.sequence.num_cached // self._core.block_size]

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Logs the loss. Unfinished writes were already ended, and leases end the rest."""
        log.info("data_peer_lost", peer=worker_id)

    # --- KV that this worker computes --------------------------------------------------------

    def begin_local(self, reservation: Reservation) -> DecodeTask | Refusal:
        """Lets this worker's own engine write all blocks of a reservation. Returns the task."""
        task = self._by_reservation.get(reservation.reservation_id)
        now = self._clock.now()
        indexes = range(reservation.num_blocks)
        granted = self._handoff.begin_write(claim_of(reservation), indexes, now)
        if isinstance(granted, Refusal):
            return granted
        assert isinstance(granted, BlockGrant), "only the engine completes this handoff"
        assert task is not None
        task.local_write = granted.write_id
        return task

    def end_local(self, task: DecodeTask) -> None:
        """Notes that the engine has written all of the blocks."""
        assert task.local_write is not None
        self._handoff.end_write(task.local_write, True, self._clock.now())
        task.local_write = None

    def commit_local(self, task: DecodeTask, reservation: Reservation) -> Refusal | None:
        """Takes the blocks over for decoding. Refused if the lease ended meanwhile."""
        outcome = self._handoff.commit(claim_of(reservation), self._clock.now())
        if isinstance(outcome, Refusal):
            return outcome
        assert isinstance(outcome, Committed), "the engine has written all of the blocks"
        self._take(task)
        return None
