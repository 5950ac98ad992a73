"""The step loop of a simulated worker: batches, block growth, preemption, modelled times.

Sequences follow the rules of `engine/core.py`. Consecutive pure decode steps are simulated as one
run, until a sequence ends, needs a block, joins or leaves.
Tests: tests/unit/sim/test_worker.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.pace import PaceRoom
from kvmesh.kv.block_pool import BlockPool
from kvmesh.policy.batching import BatchLimits, plan_batch
from kvmesh.policy.mixed_step import MixedSteps
from kvmesh.policy.step_rules import StepRules, StepTurns
from kvmesh.policy.token_pace import AnswerLength, StepFit, spare_s
from kvmesh.sim.decoding import DecodingSet
from kvmesh.sim.events import EventQueue, Timer
from kvmesh.sim.gaps import Gaps
from kvmesh.sim.host import Host
from kvmesh.sim.profile import Device, Work
from kvmesh.sim.requests import SimRequest, SimSequence, blocks_for
from kvmesh.sim.step_spans import DecodeRun, MixedStep
from kvmesh.sim.trace_request import TRACE_BLOCK


class StepListener(Protocol):
    """Callbacks for the results of a step, called when the step ends."""

    def chunk_computed(self, sequence: SimSequence) -> None:
        """Called when a chunk of a prompt is computed and others follow."""
        ...

    def first_token(self, sequence: SimSequence) -> None:
        """Called when a prompt is computed and its first token is sampled."""
        ...

    def finished(self, sequence: SimSequence) -> None:
        """Called after the last token."""
        ...

    def readmitted(self) -> None:
        """Called when a preempted sequence gets blocks again."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Token budgets of a step.

    Attributes:
        alone: tokens of a step without decode.
        mixed: tokens of a step in which a sequence decodes; the services' default.
    """

    alone: int = 4096
    mixed: int = 512


def take_blocks(pool: BlockPool, request: SimRequest, growth: int) -> tuple[list[int], int] | None:
    """Takes the blocks of a prompt, with room for `growth` more tokens.

    Returns:
        The blocks, and the number of cached ones; None if too few blocks are free.
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

    Args:
        draw: varies the times of equal work, as on the device.

    Attributes:
        computed_tokens: tokens computed since the start, without decode steps.
        busy_s: seconds spent in steps.
        gaps: times between tokens; the time until a decode worker takes over is one of them.
        rules: order within a step. Prompts beside decode are bounded by the limits of a step and by
            `itl_s`, never by a measured share, so that baselines have their own bounds.
    """

    def __init__(
        self,
        device: Device,
        pool: BlockPool,
        limits: BatchLimits,
        events: EventQueue,
        listener: StepListener,
        host: Host | None = None,
        itl_s: float = math.inf,
        draw: random.Random | None = None,
    ) -> None:
        self._device = device
        self._draw = draw or random.Random(0)
        self._host = host
        if host is not None:
            host.add(self)
        self._pool = pool
        self._limits = limits
        self._events = events
        self._listener = listener
        self._running: list[SimSequence] = []
        self._prompts: list[SimSequence] = []
        self._preempted: list[SimSequence] = []
        self._decoding = DecodingSet()
        self._run: DecodeRun | None = None
        self._in_mixed: MixedStep | None = None
        self._timer: Timer | None = None
        self._in_step = False
        self._other_work_s = 0.0  # what was left of it at `_other_work_at`
        self._other_work_at = 0.0
        self._fit = StepFit()
        self._itl_s = itl_s
        self._mixed = MixedSteps()
        self._answers = AnswerLength()
        self.gaps = Gaps()
        self.rules = StepRules()
        self._turns = StepTurns()
        self._paused_s = 0.0
        self._generated = 0
        self.computed_tokens = 0
        self.busy_s = 0.0
        self.preemptions = 0

    @property
    def num_preempted(self) -> int:
        """Number of sequences that lost their blocks and wait for new ones."""
        return len(self._preempted)

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated since the start, first tokens too."""
        self._catch_up()
        return self._generated

    def room(self, limit_s: float, awaited: Sequence[int]) -> PaceRoom:
        """Returns the room for requests with a TPOT limit.

        Args:
            limit_s: TPOT limit of every sequence here, in seconds.
            awaited: tokens of each sequence that will decode here and does not yet.
        """
        self._catch_up()
        now, steps, decoding = self._events.now(), self._decoding.steps, self._decoding
        paced = [
            (limit_s, steps - each.decodes_from, now - each.request.first_token_s)
            for each in self._running
            if each.decodes_from is not None and each.request.first_token_s is not None
        ]
        paced += [(limit_s, 0, 0.0)] * len(awaited)
        pace, current = self._fit.pace(), decoding.context
        context = current + sum(awaited)
        spare = spare_s(paced, pace.of(current), self._answers.tokens)
        if self._itl_s < math.inf and not self._mixed.has_room(self._itl_s, pace.of(current)):
            spare = 0.0
        return PaceRoom(pace, context, limit_s if context else math.inf, spare)

    def join(self, sequence: SimSequence) -> None:
        """Computes the sequence's tokens without KV, from the next step on."""
        self._interrupt()
        self._running.append(sequence)
        self._prompts.append(sequence)
        if not self._in_step:
            self._next_step()

    def leave(self, sequence: SimSequence) -> None:
        """Stops computing a sequence, if it is running or preempted."""
        if sequence in self._running:
            self._interrupt()
            self._drop(sequence)
        elif sequence in self._preempted:
            self._preempted.remove(sequence)

    def resume(self) -> None:
        """Lets preempted sequences continue after blocks were released."""
        if not self._preempted:
            return
        if self._in_step:
            self._interrupt()
        else:
            self._next_step()

    def note_work(self, seconds: float) -> None:
        """Adds other work of the worker's process, which it does beside the step in progress.

        Work that is left when the step ends delays the next step. Without a step in progress the
        call has no effect.
        """
        if seconds and self._in_step:
            self._other_work_s = self._other_work_left_s() + seconds
            self._other_work_at = self._events.now()
            self._interrupt()

    def _other_work_left_s(self) -> float:
        """Returns the seconds of other work that are left.

        Engine and event loop are threads of one interpreter: one works while the other waits.
        """
        if not self._other_work_s:
            return 0.0
        assert self._host is not None, "other work is that of a shared host"
        done_s = (self._events.now() - self._other_work_at) * self._host.idle_share(self)
        return max(self._other_work_s - done_s, 0.0)

    def others_changed(self) -> None:
        """See `Sharer`: decode steps change from the next one on, longer ones at once."""
        self._interrupt()
        step = self._in_mixed
        if step is None:
            return
        before_s, step.stretched_s = step.stretched_s, self._stretched_s(step)
        now = self._events.now()
        left_s = step.ends_at - now
        more_s = left_s * (step.stretched_s / before_s - 1) if before_s else 0.0
        if more_s:
            assert self._timer is not None, "a step has an end"
            self._timer.cancel()
            step.ends_at += more_s
            self.busy_s += more_s
            self._timer = self._events.at(step.ends_at, self._end_mixed)

    def stop(self) -> None:
        """Drops all sequences, as when the worker dies; the completed steps of a run count."""
        if self._host is not None:
            self._host.note(self, None)
        if self._timer is not None:
            self._timer.cancel()
        self._catch_up()
        self._run = self._in_mixed = None
        for sequence in self._running:
            if sequence.settled_at is not None:
                self._decoding.settle(sequence)
                sequence.left = max(sequence.left, 0)
        self._running.clear()
        self._prompts.clear()
        self._preempted.clear()
        self._decoding.clear()

    def _interrupt(self) -> None:
        """Shortens a run of decode steps to the step in progress."""
        self._catch_up()
        run = self._run
        if run is not None and run.num_steps > 1:
            run.num_steps = 1
            assert self._timer is not None, "a run has an end"
            self._timer.cancel()
            self._timer = self._events.at(run.started_at + run.first_s, self._end_run)

    def _catch_up(self) -> None:
        """Counts the completed steps of the run."""
        run = self._run
        if run is not None:
            count = run.num_over(self._events.now())
            if count:
                self._count(run, count)
                run.take(count)

    def _count(self, run: DecodeRun, count: int) -> None:
        """Counts the first `count` steps of a run as completed."""
        decoding = self._decoding
        self.busy_s += run.seconds(count)
        now, growth = (decoding.context, run.first_s), (decoding.count, run.growth_s)
        self._fit.add_run(count, now, growth)
        paused_s, self._paused_s = self._paused_s, 0.0
        self.gaps.add(paused_s + run.seconds(count) / count, count * decoding.count)
        decoding.steps += count
        self._generated += count * decoding.count
        if self._host is not None:
            self._host.note_tokens(count * decoding.count)

    def _drop(self, sequence: SimSequence) -> None:
        self._running.remove(sequence)
        if sequence.settled_at is not None:
            self._decoding.stop(sequence)
        else:
            self._prompts.remove(sequence)

    # --- starting ----------------------------------------------------------------------------

    def _next_step(self) -> None:
        if self._preempted:
            self._readmit()
        if self._prompts:
            for each in [each for each in self._prompts if each.has_first and each.remaining == 1]:
                self._prompts.remove(each)
                if each.decodes_from is None and each.request.first_token_s is not None:
                    self.gaps.add(self._events.now() - each.request.first_token_s, 1)
                self._decoding.start(each)
        for sequence in self._decoding.take_due():
            # A sequence that was preempted for an older one is no longer running.
            if sequence.settled_at is not None and self._grow(sequence):
                self._decoding.await_due(sequence)
        self._in_step = bool(self._running)
        if not self._in_step:
            self._other_work_s = 0.0
        if self._host is not None:
            work = Work.PROMPT if self._prompts else Work.STEPS
            self._host.note(self, work if self._in_step else None)
        if self._prompts:
            self._start_mixed()
        elif self._decoding.count:
            self._start_run()

    def _start_run(self) -> None:
        decoding = self._decoding
        # The first gap after steps without decoding is counted alone.
        num_steps = 1 if self._paused_s else decoding.steps_to_next()
        varied = self._varied()
        step_s = varied * self._step_s(decoding.count, decoding.context)
        after_s = varied * self._step_s(decoding.count, decoding.context + decoding.count)
        growth_s = after_s - step_s
        begin = self._events.now() + self._take_other_work_s()
        self._run = run = DecodeRun(begin, step_s, growth_s, num_steps)
        self._timer = self._events.at(begin + run.seconds(num_steps), self._end_run)

    def _take_other_work_s(self) -> float:
        seconds, self._other_work_s = self._other_work_left_s(), 0.0
        return seconds

    def _start_mixed(self) -> None:
        count = self._decoding.count
        remaining = [1] * count + [each.remaining for each in self._prompts]
        decode_s = self._fit.pace().of(self._decoding.context) if count else 0.0
        beside = self._mixed.most_tokens(self._itl_s, decode_s) if count else None
        is_first = self._turns.prompts_first(self.rules)
        first = range(count, len(remaining)) if is_first else ()
        plans = plan_batch(remaining, self._limits, beside, first)
        chunks = [(self._prompts[p.index - count], p.num_tokens) for p in plans if p.index >= count]
        decodes = bool(count) and any(plan.index < count for plan in plans)
        self._turns.note(left_out=bool(count) and not decodes)
        context = self._decoding.context
        if not decodes:
            count, context = 0, 0
        chunks_s = 0.0
        for sequence, tokens in chunks:
            if tokens > 1:
                chunks_s += self._chunk_s(sequence, tokens)
            else:
                # The last token of a prompt counts as a decode step.
                count += 1
                context += sequence.num_tokens
        decode_s = self._device.decode.step_s(count, context) if count else 0.0
        now = self._events.now()
        step = MixedStep(chunks, decodes, chunks_s, decode_s, now, now, 0.0)
        self._in_mixed = step
        step.stretched_s = self._stretched_s(step)
        if self._itl_s < math.inf and chunks_s:
            tokens = sum(tokens for _, tokens in chunks if tokens > 1)
            self._mixed.add(tokens, step.stretched_s * chunks_s / (chunks_s + decode_s))
        duration = step.stretched_s + self._take_other_work_s()
        self.busy_s += duration
        step.ends_at = now + duration
        self._timer = self._events.at(step.ends_at, self._end_mixed)

    def _stretched_s(self, step: MixedStep) -> float:
        if self._host is None:
            return step.chunks_s + step.decode_s
        chunks_s = step.chunks_s * self._host.prefill_stretch(self)
        return chunks_s + step.decode_s * self._host.decode_stretch(self)

    def _step_s(self, num_sequences: int, context: float) -> float:
        alone = self._device.decode.step_s(num_sequences, context)
        return alone if self._host is None else alone * self._host.decode_stretch(self)

    def _chunk_s(self, sequence: SimSequence, count: int) -> float:
        """Returns the seconds of a chunk on a host of its own; the first one includes the fixed
        cost of a prompt.
        """
        before = sequence.num_computed
        is_first = before == sequence.num_cached
        return self._device.chunk_s(before, before + count, is_first=is_first) * self._varied()

    def _varied(self) -> float:
        """Returns a factor on the time of a chunk or a run of steps; log-normal, of mean 1."""
        spread = self._device.spread
        return math.exp(self._draw.gauss(-spread * spread / 2, spread)) if spread else 1.0

    # --- ending ------------------------------------------------------------------------------

    def _end_run(self) -> None:
        run, self._run = self._run, None
        assert run is not None, "a run that ends was started"
        self._count(run, run.num_steps)
        self._finish_due()
        self._next_step()

    def _end_mixed(self) -> None:
        step, self._in_mixed = self._in_mixed, None
        assert step is not None, "a step that ends was started"
        duration = self._events.now() - step.started_at
        if step.decodes:
            self.gaps.add(self._paused_s + duration, self._decoding.count)
            self._paused_s = 0.0
        else:
            self._paused_s = self._paused_s + duration if self._decoding.count else 0.0
        self._decoding.steps += step.decodes
        self._generated += self._decoding.count * step.decodes
        for sequence, count in step.chunks:
            if not sequence.gone:
                self._advance(sequence, count)
        self._finish_due()
        self._next_step()

    def _finish_due(self) -> None:
        for sequence in self._decoding.take_due():
            self._decoding.settle(sequence)
            if sequence.left <= 0:
                self._end(sequence)
            else:
                self._decoding.put_due(sequence)

    def _advance(self, sequence: SimSequence, count: int) -> None:
        if count > 1:
            self.computed_tokens += count
        sequence.num_computed += count
        self.seal(sequence)
        if sequence.remaining:
            self._listener.chunk_computed(sequence)
            return
        sequence.num_tokens += 1
        sequence.left -= 1
        self._generated += 1
        if not sequence.has_first:
            sequence.has_first = True
            if sequence.hold_after_first:
                self._drop(sequence)
            self._listener.first_token(sequence)
        if sequence.left <= 0 and not sequence.hold_after_first and not sequence.gone:
            self._end(sequence)

    def _end(self, sequence: SimSequence) -> None:
        self._answers.add(sequence.request.trace.output_tokens)
        self._listener.finished(sequence)

    def seal(self, sequence: SimSequence) -> None:
        """Puts computed prompt blocks into the prefix cache; no other prompt has the answer's."""
        hashes = sequence.request.hashes
        full = min(sequence.num_computed // TRACE_BLOCK, len(hashes))
        if full <= sequence.num_sealed:
            return
        for index in range(sequence.num_sealed, full):
            self._pool.seal(sequence.blocks[index], hashes[index])
        sequence.num_sealed = full

    # --- blocks ------------------------------------------------------------------------------

    def _grow(self, sequence: SimSequence) -> bool:
        """Adds a block for the next token if needed; False if the sequence itself was preempted."""
        self._decoding.settle(sequence)
        while (missing := blocks_for(sequence.num_tokens) - len(sequence.blocks)) > 0:
            try:
                sequence.blocks += self._pool.allocate(missing, after=sequence.blocks[-1])
            except OutOfBlocksError:
                # Preempts the youngest sequence, which may be this one.
                victim = self._running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
        return True

    def _preempt(self, victim: SimSequence) -> None:
        self.preemptions += 1
        self._drop(victim)
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
            for waiting in (self._running, self._prompts):
                waiting.append(sequence)
                waiting.sort(key=lambda each: each.order)
            self._listener.readmitted()
