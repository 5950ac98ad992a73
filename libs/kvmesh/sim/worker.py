"""A worker with modelled step times. Admission, blocks, prefix cache, handoffs and batches are real
code. Tests: tests/unit/sim/test_worker.py.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from functools import partial

from kvmesh.core.block_names import DISK, HOST
from kvmesh.core.busy_time import BusyTime
from kvmesh.core.pace import PaceRoom
from kvmesh.core.types import (
    BlockHash,
    Refusal,
    RefusalReason,
    Role,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.handoff import HandoffTable
from kvmesh.kv.handoff_types import BlockGrant, Committed, WriteClaim
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.token_pace import takes
from kvmesh.sim.events import EventQueue
from kvmesh.sim.host import Host
from kvmesh.sim.profile import Device
from kvmesh.sim.requests import SimRequest, SimSequence, blocks_for
from kvmesh.sim.steps import StepLoop, take_blocks
from kvmesh.sim.tiers import SimTiers
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker_listener import WorkerListener
from kvmesh.sim.worker_rules import WorkerRules

CAPABILITY, GENERATION = b"simulated", 1
LEASE_S = 1e9
"""Seconds of a lease, longer than any run: gateways renew reservations and cancel dropped ones."""

GROWTH_TOKENS = 64

_ALL_ROOM = PaceRoom()


class SimWorker:
    """One instance.

    Args:
        block_bytes: average bytes of a block of KV.
        host: host whose cores it shares with others; None: it has its own.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache at prefill, since the start.
        sending: time with KV in flight to other workers.
    """

    def __init__(
        self,
        info: WorkerInfo,
        device: Device,
        events: EventQueue,
        listener: WorkerListener,
        rules: WorkerRules,
        block_bytes: float,
        host: Host | None = None,
    ) -> None:
        self.info = info
        self.device = device
        self.pool = BlockPool(info.num_blocks, TRACE_BLOCK)
        self.tiers: SimTiers | None = None
        if rules.tiers.speeds:
            self.tiers = SimTiers(self.pool, rules.tiers, block_bytes)
        self.handoff = HandoffTable(info.incarnation, LEASE_S)
        self.alive = True
        self.cached_tokens = 0
        self.sending = BusyTime()
        self._sending_blocks = 0
        self._events = events
        self._listener = listener
        self._rules = rules
        num_slots = info.prefill_slots + info.decode_slots
        limits = BatchLimits(rules.chunks.alone, num_slots, rules.chunks.mixed)
        draw = random.Random(str(info.worker_id))
        self.steps = StepLoop(device, self.pool, limits, events, self, host, rules.itl_s, draw)
        self.steps.rules = rules.steps_of(info.role)
        self._num_sequences = 0
        self._waiting: list[SimSequence] = []
        self._prefills: set[SimSequence] = set()
        self._decodes: set[SimSequence] = set()
        self._num_reserved = 0
        self._load: WorkerLoad | None = None
        self._loop = None if host is None else host.sharing.loop
        self._part_tokens = 0

    @property
    def is_free(self) -> bool:
        """Whether it is idle and may compute a part of another worker's prompt."""
        return self.alive and not (
            self._prefills or self._decodes or self._waiting or self._part_tokens
        )

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest sequence that fits."""
        return min(self.info.max_model_len, self.info.num_blocks * TRACE_BLOCK)

    # --- admission ---------------------------------------------------------------------------

    def reserve(self, request: SimRequest) -> SimSequence | Refusal:
        """Reserves a slot and blocks for a request's decode."""
        if not self.alive:
            return Refusal(RefusalReason.LOST, "the worker is down")
        if len(self._decodes) >= self.info.decode_slots:
            return Refusal(RefusalReason.NO_SLOTS, "all decode slots are taken")
        if self.steps.num_preempted:
            return Refusal(RefusalReason.NO_BLOCKS, "sequences that were preempted come first")
        if not takes(self._room(), self._rules.tpot_s, request.num_tokens):
            return Refusal(RefusalReason.NO_SLOTS, "its steps would take longer than accepted")
        sequence = self._admit(request, min(GROWTH_TOKENS, request.remaining_tokens))
        if isinstance(sequence, Refusal):
            return sequence
        sequence.reservation = self.handoff.reserve(
            request.request_id,
            sequence.blocks[: blocks_for(sequence.num_tokens)],
            sequence.num_cached // TRACE_BLOCK,
            CAPABILITY,
            GENERATION,
            self._events.now(),
        )
        self._decodes.add(sequence)
        self._num_reserved += 1
        if self._loop is not None:
            loop = self._loop
            self.steps.note_work(loop.decode_s + request.num_tokens * loop.decode_token_s)
        self._changed()
        return sequence

    def offer(
        self, request: SimRequest, reserved: SimSequence, *, held: bool = False
    ) -> SimSequence | Refusal:
        """Offers a prompt; accepted if a slot and blocks are free (P/D-Serve 3.5).

        Args:
            reserved: the request's reservation; if it is on this worker, the prompt is computed in
                its blocks.
            held: whether the prompt waits for a prefix from another worker; `go_on` follows.
        """
        assert not (held and self._rules.queue_offers), "policies that fetch have no local queues"
        if not self.alive:
            return Refusal(RefusalReason.LOST, "the worker is down")
        is_full = len(self._prefills) >= self.info.prefill_slots
        is_busy = is_full or bool(self._waiting or self._part_tokens)
        if is_busy and not self._rules.queue_offers:
            return Refusal(RefusalReason.BUSY, "all prefill slots are taken")
        if reserved in self._decodes:
            self._end_reservation(reserved, written=False)
            return self._start_prefill(reserved, held=held)
        sequence = None if is_busy else self._admit(request, 0)
        if isinstance(sequence, SimSequence):
            sequence.hold_after_first = True
            return self._start_prefill(sequence, held=held)
        if isinstance(sequence, Refusal):
            lacks_blocks = sequence.reason is RefusalReason.NO_BLOCKS
            if not (self._rules.queue_offers and lacks_blocks):
                return sequence
        waiting = self._new_sequence(request)
        waiting.hold_after_first = True
        self._waiting.append(waiting)
        self._changed()
        return waiting

    def note_refusal(self) -> None:
        """Counts the time of a refused request."""
        if self._loop is not None:
            self.steps.note_work(self._loop.ask_s)

    def _admit(self, request: SimRequest, growth: int) -> SimSequence | Refusal:
        if request.num_tokens + 1 > self.max_tokens:
            return Refusal(RefusalReason.TOO_LONG, f"at most {self.max_tokens} tokens fit")
        room = self.max_tokens - request.num_tokens
        blocks = take_blocks(self.pool, request, min(growth, room))
        if blocks is None:
            return Refusal(RefusalReason.NO_BLOCKS, f"{self.pool.num_free} blocks are free")
        sequence = self._new_sequence(request)
        sequence.fill(*blocks)
        return sequence

    def _new_sequence(self, request: SimRequest) -> SimSequence:
        self._num_sequences += 1
        left, num_tokens = request.remaining_tokens, request.num_tokens
        return SimSequence(request, self._num_sequences, left, num_tokens)

    def _start_prefill(self, sequence: SimSequence, *, held: bool = False) -> SimSequence:
        self.cached_tokens += sequence.num_cached
        self._prefills.add(sequence)
        if self._loop is not None:
            loop = self._loop
            self.steps.note_work(loop.prompt_s + sequence.num_tokens * loop.prompt_token_s)
        self._changed()
        if not held:
            self._load_or_join(sequence)
        return sequence

    def _load_or_join(self, sequence: SimSequence) -> None:
        """Computes a prompt, behind what comes up of it first if that is sooner."""
        tiers, hashes = self.tiers, sequence.request.reusable_hashes
        held = sequence.num_cached // TRACE_BLOCK
        length = held if tiers is None else tiers.reach(hashes, held)
        further = hashes[held:length]
        alone_s = self.device.prefill_s(len(further) * TRACE_BLOCK) if further else 0.0
        if tiers is None or not further or not tiers.pays(further, alone_s):
            self.steps.join(sequence)
            return
        seconds = tiers.load_s(further)
        tiers.take(further)
        self._events.after(seconds, partial(self._loaded, sequence, length))

    def _loaded(self, sequence: SimSequence, num_blocks: int) -> None:
        if not sequence.gone:
            self._have(sequence, num_blocks)
            self.steps.join(sequence)

    def go_on(self, sequence: SimSequence, num_blocks: int) -> None:
        """Computes a held prompt after its prefix has arrived.

        Args:
            num_blocks: number of leading blocks that are here now because of the fetch.
        """
        self._have(sequence, num_blocks)
        self._load_or_join(sequence)

    def _have(self, sequence: SimSequence, num_blocks: int) -> None:
        num_tokens = num_blocks * TRACE_BLOCK
        if num_tokens > sequence.num_cached:
            self.cached_tokens += num_tokens - sequence.num_cached
            sequence.num_computed = sequence.num_cached = num_tokens
            self.steps.seal(sequence)
        self._changed()

    def go_on_behind(self, sequence: SimSequence, num_tokens: int) -> None:
        """Computes the rest of a held prompt whose beginning other workers have computed."""
        sequence.num_computed = num_tokens
        self.steps.seal(sequence)
        self._changed()
        self.steps.join(sequence)

    def begin_part(self, num_tokens: int) -> None:
        """Computes a part of a prompt for another worker."""
        assert self.is_free, "such a worker has nothing else to do"
        self._part_tokens = num_tokens
        self._changed()

    def end_part(self, num_tokens: int) -> None:
        """Ends the computation of a part."""
        self._part_tokens = 0
        self.steps.computed_tokens += num_tokens
        self._changed()
        self._listener.on_opening()
        self._admit_waiting()

    # --- reads by other workers --------------------------------------------------------------

    def lend(self, hashes: Sequence[BlockHash], num_held: int) -> tuple[list[int], float]:
        """Pins cached blocks from `num_held` on, until `take_back`.

        Returns:
            The blocks, as many as fit into the pool at a time, and the seconds until those that
            were below the pool are up.
        """
        rest = hashes[num_held:]
        seconds = 0.0 if self.tiers is None else self.tiers.bring_up(rest)
        blocks = self.pool.match(rest)
        self.pool.acquire(blocks)
        self._changed()
        return blocks, seconds

    def take_back(self, blocks: list[int]) -> None:
        """Releases lent blocks when the reader is done or gone."""
        self.pool.release(blocks)
        self._changed()
        self._listener.on_opening()
        self.steps.resume()

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._prefills) < self.info.prefill_slots:
            sequence = self._waiting[0]
            blocks = take_blocks(self.pool, sequence.request, 0)
            if blocks is None:
                return
            self._waiting.pop(0)
            sequence.fill(*blocks)
            self._start_prefill(sequence)

    # --- handoff -----------------------------------------------------------------------------

    def begin_write(self, sequence: SimSequence, first: int, count: int) -> int:
        """Begins a write of KV into a reservation; `end_write` follows.

        Args:
            first: index of the first block among the reservation's blocks to write.
            count: number of blocks.
        """
        indexes = range(first, first + count)
        grant = self.handoff.begin_write(self._claim(sequence), indexes, self._events.now())
        assert isinstance(grant, BlockGrant), grant
        return grant.write_id

    def _claim(self, sequence: SimSequence) -> WriteClaim:
        assert sequence.reservation is not None, "no reservation to write to"
        return WriteClaim(sequence.reservation, self.info.incarnation, GENERATION, CAPABILITY)

    def begin_sending(self, num_blocks: int) -> None:
        """Records that blocks of a computed prompt leave for another worker."""
        self.sending.begin(self._events.now())
        self._sending_blocks += num_blocks
        self._changed()

    def end_sending(self, num_blocks: int) -> None:
        """Records that such blocks have left."""
        self.sending.end(self._events.now())
        self._sending_blocks -= num_blocks
        if self.alive:
            self._changed()

    def end_write(self, write_id: int, *, ok: bool) -> None:
        """Ends a write: all bytes have arrived, or the transfer broke off."""
        self.handoff.end_write(write_id, ok, self._events.now())
        self._release_quiet()

    def start_decode(self, sequence: SimSequence) -> None:
        """Starts decoding: the prompt's KV has arrived and the first token was sampled."""
        self._end_reservation(sequence, written=True)
        sequence.num_computed = sequence.num_tokens
        self.steps.seal(sequence)
        sequence.num_tokens += 1
        sequence.left -= 1
        sequence.has_first = True
        self._changed()
        self.steps.join(sequence)

    def _end_reservation(self, sequence: SimSequence, *, written: bool) -> None:
        """Turns the reservation's blocks into the sequence's own.

        Args:
            written: whether a prefill worker wrote them; else the prompt is computed in them here.
        """
        assert sequence.reservation is not None, "the reservation has ended"
        if not written:
            num_cached = sequence.num_cached // TRACE_BLOCK
            count = blocks_for(sequence.num_tokens) - num_cached
            self.end_write(self.begin_write(sequence, 0, count), ok=True)
        now = self._events.now()
        done = self.handoff.commit(self._claim(sequence), now)
        assert isinstance(done, Committed), done
        taken = self.handoff.take(sequence.reservation)
        assert not isinstance(taken, Refusal), taken
        self.handoff.forget(sequence.reservation)
        sequence.reservation = None
        self._num_reserved -= 1

    def release(self, sequence: SimSequence) -> None:
        """Ends a sequence in any state and gives its blocks back; may be called again."""
        if sequence.gone:
            return
        sequence.gone = True
        self.steps.leave(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        self._prefills.discard(sequence)
        self._decodes.discard(sequence)
        if sequence.reservation is None:
            self.pool.release(sequence.blocks)
        else:
            self.handoff.cancel(sequence.reservation)
            self._num_reserved -= 1
            self._release_quiet()
            # Blocks beyond the prompt never belonged to the handoff table.
            self.pool.release(sequence.blocks[blocks_for(sequence.num_tokens) :])
        sequence.blocks = []
        self._changed()
        self._listener.on_opening()
        self.steps.resume()
        self._admit_waiting()

    def _release_quiet(self) -> None:
        for released in self.handoff.drain_released():
            self.pool.release(released.blocks)
            self._changed()
            self._listener.on_opening()
            self.steps.resume()

    # --- results of steps --------------------------------------------------------------------

    def chunk_computed(self, sequence: SimSequence) -> None:
        """See `StepListener`."""
        self._changed()
        if sequence.hold_after_first:
            self._listener.on_chunk(self, sequence)

    def first_token(self, sequence: SimSequence) -> None:
        """See `StepListener`."""
        if not sequence.hold_after_first:
            self._prefills.discard(sequence)
            self._listener.on_opening()
            self._admit_waiting()
        self._changed()
        self._listener.on_first_token(self, sequence)
        if sequence.hold_after_first and not sequence.gone:
            self._listener.on_chunk(self, sequence)

    def finished(self, sequence: SimSequence) -> None:
        """See `StepListener`."""
        self.release(sequence)
        self._listener.on_finished(self, sequence)

    def readmitted(self) -> None:
        """See `StepListener`."""
        self._changed()
        self._listener.on_opening()

    # --- state -------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._load = None
        self._listener.on_change(self)

    def load(self) -> WorkerLoad:
        """Returns the load that the worker reports."""
        if self._load is None:
            num_preempted, tiers = self.steps.num_preempted, self.tiers
            self._load = WorkerLoad(
                prefill_active=len(self._prefills) + len(self._waiting) + bool(self._part_tokens),
                decode_running=len(self._decodes) - self._num_reserved - num_preempted,
                decode_reserved=self._num_reserved,
                decode_preempted=num_preempted,
                blocks_free=self.pool.num_free,
                prefill_tokens_total=self.steps.computed_tokens,
                prefill_sending=self.num_sending,
                sending_bytes=self._sending_blocks * self.info.layout.block_bytes,
                room=self._room(),
                host_token_s=0.0 if tiers is None else tiers.block_s(HOST) / TRACE_BLOCK,
                disk_token_s=0.0 if tiers is None else tiers.block_s(DISK) / TRACE_BLOCK,
            )
        return self._load

    def _room(self) -> PaceRoom:
        # A worker that decodes nothing has room for any request, whatever its speed.
        if self._rules.tpot_s == math.inf or not self._decodes:
            return _ALL_ROOM
        reserved = self._decodes if self._num_reserved else ()
        awaited = [each.num_tokens for each in reserved if not each.has_first]
        return self.steps.room(self._rules.tpot_s, awaited)

    @property
    def num_sending(self) -> int:
        """Number of computed prompts whose KV is not sent yet."""
        return sum([each.has_first for each in self._prefills])

    @property
    def num_waiting(self) -> int:
        """Number of prompts in the local queue."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are accepted and not computed."""
        tokens = self._part_tokens
        # A plain loop without temporary objects: every decision reads this.
        for accepted in (self._prefills, self._waiting):
            for each in accepted:
                if not each.has_first:
                    tokens += each.num_tokens - each.num_computed
        return tokens

    def fail(self) -> list[SimSequence]:
        """Kills the worker; returns its sequences, oldest first."""
        self.alive = False
        self._part_tokens = 0
        self.steps.stop()
        lost = {*self._prefills, *self._decodes, *self._waiting}
        for sequence in lost:
            sequence.gone = True
        self._changed()
        return sorted(lost, key=lambda each: each.order)

    def set_role(self, role: Role) -> None:
        """Changes the role for new requests; running ones continue."""
        self.info = dataclasses.replace(self.info, role=role)
        self.steps.rules = self._rules.steps_of(role)
        self._changed()
        self._listener.on_opening()
