"""The step loop of a simulated worker: batches, block growth, preemption, modelled times.

Sequences follow the rules of `engine/core.py`. Steps of decode alone are taken many at a time,
until a sequence ends, needs a block, or somebody joins or leaves.
Tests: tests/unit/sim/test_worker.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.kv.block_pool import BlockPool
from kvmesh.policy.batching import BatchLimits, plan_batch
from kvmesh.sim.events import EventQueue, Timer
from kvmesh.sim.profile import Device
from kvmesh.sim.requests import SimRequest, SimSequence, blocks_for
from kvmesh.sim.trace import TRACE_BLOCK


class StepListener(Protocol):
    """Who is told what steps bring about; called when the step is over."""

    def chunk_computed(self, sequence: SimSequence) -> None:
        """A part of a prompt is computed, the rest follows."""
        ...

    def first_token(self, sequence: SimSequence) -> None:
        """A prompt is computed and its first token is out."""
        ...

    def finished(self, sequence: SimSequence) -> None:
        """The last token is out."""
        ...

    def readmitted(self) -> None:
        """Preempted sequences have blocks again."""
        ...


@dataclass(slots=True)
class _Run:
    """Decode steps in progress: `num_steps` of `step_s` each."""

    members: list[SimSequence]
    started_at: float
    step_s: float
    num_steps: int


def take_blocks(pool: BlockPool, request: SimRequest, growth: int) -> tuple[list[int], int] | None:
    """Blocks of a prompt and room to grow, and how many of them are cached.

    Returns:
        None when too few blocks are free.
    """
    cached = pool.match(request.reusable_hashes)
    pool.acquire(cached)
    needed = blocks_for(request.num_tokens + growth) - len(cached)
    try:
        fresh = pool.allocate(needed, after=cached[-1] if cached else None)
    except OutOfBlocksError:
        pool.release(cached)
        return None
    return cached + fresh, len(cached)


class StepLoop:
    """Sequences that compute on one worker, oldest first.

    Attributes:
        computed_tokens: since the start, without decode steps.
        busy_s: seconds spent in steps.
    """

    def __init__(
        self,
        device: Device,
        pool: BlockPool,
        limits: BatchLimits,
        events: EventQueue,
        listener: StepListener,
    ) -> None:
        self._device = device
        self._pool = pool
        self._limits = limits
        self._events = events
        self._listener = listener
        self._running: list[SimSequence] = []
        self._preempted: list[SimSequence] = []
        self._run: _Run | None = None
        self._timer: Timer | None = None
        self._in_step = False
        self.computed_tokens = 0
        self.busy_s = 0.0
        self.preemptions = 0

    @property
    def num_preempted(self) -> int:
        """Sequences that lost their blocks and wait for new ones."""
        return len(self._preempted)

    def join(self, sequence: SimSequence) -> None:
        """Computes what the sequence has no KV for, from the next step on."""
        self._interrupt()
        self._running.append(sequence)
        if not self._in_step:
            self._next_step()

    def leave(self, sequence: SimSequence) -> None:
        """Stops computing a sequence, if it does."""
        if sequence in self._running:
            self._interrupt()
            self._running.remove(sequence)
        elif sequence in self._preempted:
            self._preempted.remove(sequence)

    def stop(self) -> None:
        """Ends everything, as the death of the worker does; whole steps of a run count."""
        if self._timer is not None:
            self._timer.cancel()
        run, self._run = self._run, None
        if run is not None:
            done = int((self._events.now() - run.started_at) / run.step_s)
            for sequence in run.members:
                sequence.left -= min(done, sequence.left)
        self._running.clear()
        self._preempted.clear()

    def _interrupt(self) -> None:
        """Ends a run of decode steps at the end of the step in progress."""
        run = self._run
        if run is None:
            return
        elapsed = self._events.now() - run.started_at
        done = max(math.ceil(elapsed / run.step_s - 1e-9), 1)
        if done < run.num_steps:
            run.num_steps = done
            assert self._timer is not None, "a run has an end"
            self._timer.cancel()
            self._timer = self._events.at(run.started_at + done * run.step_s, self._end_run)

    # --- starting ----------------------------------------------------------------------------

    def _next_step(self) -> None:
        self._readmit()
        plans = plan_batch([each.remaining for each in self._running], self._limits)
        chosen = [(self._running[plan.index], plan.num_tokens) for plan in plans]
        members: dict[SimSequence, int] = {}
        for sequence, count in chosen:
            # One that was preempted for an older one is no longer running.
            if sequence in self._running and self._grow(sequence, count, members):
                members[sequence] = count
        self._in_step = bool(members)
        if members and all(each.has_first and each.remaining == 1 for each in members):
            self._start_run(list(members))
        elif members:
            self._start_mixed(members)

    def _start_run(self, members: list[SimSequence]) -> None:
        room = min(len(each.blocks) * TRACE_BLOCK - each.num_computed for each in members)
        num_steps = min(room, *(each.left for each in members))
        # The context of the middle step stands for all of them.
        context = sum(each.num_tokens for each in members) + len(members) * (num_steps - 1) / 2
        step_s = self._device.decode.step_s(len(members), context)
        self._run = _Run(members, self._events.now(), step_s, num_steps)
        self._timer = self._events.after(num_steps * step_s, self._end_run)

    def _start_mixed(self, members: dict[SimSequence, int]) -> None:
        decoding = [each for each in members if each.remaining == 1]
        duration = sum(
            self._chunk_s(each, count) for each, count in members.items() if each.remaining > 1
        )
        if decoding:
            context = sum(each.num_tokens for each in decoding)
            duration += self._device.decode.step_s(len(decoding), context)
        self.busy_s += duration
        self._timer = self._events.after(duration, lambda: self._end_mixed(members))

    def _chunk_s(self, sequence: SimSequence, count: int) -> float:
        """Time of a part of a prompt; what every prompt costs at least comes with its first part.

        The profile's time is that of the uncached tokens, as in PrfaaS 3.4.1.
        """
        before = sequence.num_computed - sequence.num_cached
        whole = self._device.prefill_s(before + count)
        return whole - self._device.prefill_s(before) if before else whole

    # --- ending ------------------------------------------------------------------------------

    def _end_run(self) -> None:
        run, self._run = self._run, None
        assert run is not None, "a run that ends was started"
        self.busy_s += run.num_steps * run.step_s
        members = [each for each in run.members if not each.gone]
        for sequence in members:
            sequence.num_computed += run.num_steps
            sequence.num_tokens += run.num_steps
            sequence.left -= run.num_steps
            self.seal(sequence)
        for sequence in members:
            if sequence.left <= 0:
                self._listener.finished(sequence)
        self._next_step()

    def _end_mixed(self, members: dict[SimSequence, int]) -> None:
        for sequence, count in members.items():
            if not sequence.gone:
                self._advance(sequence, count)
        self._next_step()

    def _advance(self, sequence: SimSequence, count: int) -> None:
        if sequence.remaining > 1:
            self.computed_tokens += count
        sequence.num_computed += count
        self.seal(sequence)
        if sequence.remaining:
            self._listener.chunk_computed(sequence)
            return
        sequence.num_tokens += 1
        sequence.left -= 1
        if not sequence.has_first:
            sequence.has_first = True
            if sequence.hold_after_first:
                self._running.remove(sequence)
            self._listener.first_token(sequence)
        if sequence.left <= 0 and not sequence.hold_after_first and not sequence.gone:
            self._listener.finished(sequence)

    def seal(self, sequence: SimSequence) -> None:
        """Makes computed blocks of the prompt shareable; generated text is known to nobody else."""
        hashes = sequence.request.hashes
        full = min(sequence.num_computed // TRACE_BLOCK, len(hashes))
        for index in range(sequence.num_sealed, full):
            self._pool.seal(sequence.blocks[index], hashes[index])
        sequence.num_sealed = max(sequence.num_sealed, full)

    # --- blocks ------------------------------------------------------------------------------

    def _grow(self, sequence: SimSequence, count: int, protected: dict[SimSequence, int]) -> bool:
        end = sequence.num_computed + count
        while (missing := blocks_for(end) - len(sequence.blocks)) > 0:
            try:
                sequence.blocks += self._pool.allocate(missing, after=sequence.blocks[-1])
            except OutOfBlocksError:
                # The one that asks is itself not protected, so there always is a victim.
                victim = next(s for s in reversed(self._running) if s not in protected)
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, victim: SimSequence) -> None:
        self.preemptions += 1
        self._running.remove(victim)
        self._pool.release(victim.blocks)
        victim.fill([], 0)
        self._preempted.append(victim)
        self._preempted.sort(key=lambda each: each.order)

    def _readmit(self) -> None:
        while self._preempted:
            sequence = self._preempted[0]
            growth = sequence.num_tokens - sequence.request.num_tokens
            taken = take_blocks(self._pool, sequence.request, growth)
            if taken is None:
                return
            self._preempted.pop(0)
            sequence.fill(*taken)
            self._running.append(sequence)
            self._running.sort(key=lambda each: each.order)
            self._listener.readmitted()
