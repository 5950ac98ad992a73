"""Bookkeeping of a worker's engine: sequences, blocks, the content of steps. No torch, no I/O.

It runs on the event loop; only `ModelRunner.execute` runs in another thread. So nothing needs a
lock, but `release` waits for the end of a step in flight that uses the sequence's memory.
Tests: tests/unit/engine/test_core.py, tests/property/test_engine_core.py.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvmesh.core.details import QueueLengths
from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.types import (
    BlockHash,
    FinishReason,
    Refusal,
    RefusalReason,
    SequenceSpec,
    Structure,
)
from kvmesh.engine.admission import misfit
from kvmesh.engine.preemption import PreemptedSequences
from kvmesh.engine.prefix_fill import PrefixFill, PrefixFills
from kvmesh.engine.protocol import (
    ModelSpec,
    SampledToken,
    SequenceChunk,
    StepResult,
    TokenConstraint,
)
from kvmesh.engine.queues import queue_lengths
from kvmesh.engine.remote import come_back
from kvmesh.engine.running import RunningSequences
from kvmesh.engine.sequence import Emission, Sequence, SequenceState, state_chunk
from kvmesh.engine.statistics import EngineStatistics
from kvmesh.engine.swap_space import SwapSpace, SwapStatistics
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import (
    ArrivingBlock,
    arriving_blocks,
    longest_sequence,
    num_blocks_of,
    state_interval,
)
from kvmesh.kv.hashing import HashChain
from kvmesh.kv.sequence_blocks import GroupCache
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.step_rules import StepRules

_NOT_NUMBERS = "the engine computed logits that are not numbers"


class EngineCore:
    """All sequences of a worker and the blocks they use.

    Args:
        spec: the model.
        num_blocks: number of KV blocks of the runner.
        limits: limits of one step.
        growth_tokens: generated tokens for which admission to decode takes blocks in advance.
        state_interval_tokens: tokens between saved states of linear layers; 0 for the cost rule.
        constrain: creates the constraint of a structure; None refuses structures.
        swap: host memory for preempted sequences; None recomputes them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        limits: BatchLimits | None = None,
        growth_tokens: int = 64,
        state_interval_tokens: int = 0,
        constrain: Callable[[Structure], TokenConstraint] | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        self.spec = spec
        self.block_size = spec.layout.block_size
        self._limits = limits or BatchLimits()
        # A sequence of this length fits if it is alone on the worker, so preemption always ends.
        fitting = longest_sequence(
            spec.groups, num_blocks, self._limits.max_tokens, self.block_size
        )
        self.max_model_len = min(spec.max_model_len, fitting)
        self.pool = BlockPool(num_blocks, self.block_size, spec.groups)
        interval = state_interval(spec.groups, self.block_size, state_interval_tokens)
        self._cache = GroupCache(self.pool, spec.groups, interval)
        self._growth_tokens = growth_tokens
        self._constrain = constrain
        self.on_sealed: Callable[[Sequence, int], None] | None = None
        """Called with a sequence and the index of the first block that others can share now."""
        self._next_id = 1
        self._held: set[Sequence] = set()
        self._swap = swap
        self._preempted = PreemptedSequences(self._cache, self._num_reusable_again, swap)
        self._running = RunningSequences(self._cache, self._limits, self._preempted)
        self._gone: list[int] = []
        self._running.on_preempted = self._lost
        self.fills = PrefixFills(self._cache, self.pool, spec.groups, self._free_blocks)
        """Prefixes that arrive from other workers."""
        self._in_flight: frozenset[Sequence] = frozenset()
        self._released_in_flight: list[Sequence] = []
        self._prompt_tokens = self._cached_tokens = 0
        self._computed_tokens = self._generated_tokens = 0
        self._steps = self._damaged = 0

    # --- admission ---------------------------------------------------------------------------

    def admit_prefill(self, spec: SequenceSpec, *, held: bool = False) -> Sequence | Refusal:
        """Admits a prompt whose KV goes to another worker; it runs at once and stops after the
        first token.

        Args:
            held: the sequence waits for the caller's `run`.
        """
        sequence = self._admit(spec, None)
        if isinstance(sequence, Sequence):
            sequence.hold_after_first = True
            if not held:
                self.run(sequence)
        return sequence

    def admit_decode(self, spec: SequenceSpec) -> Sequence | Refusal:
        """Takes blocks for a prompt computed elsewhere (or later here), and for growth.

        The sequence is HELD until `start_decode` or `run`.
        """
        if self._preempted:
            return self._no_blocks("sequences that were preempted come first")
        remaining = spec.num_prompt_tokens + spec.sampling.max_tokens - len(spec.token_ids)
        growth = min(self._growth_tokens, max(remaining, 0))
        return self._admit(spec, growth)

    def _admit(self, spec: SequenceSpec, growth_tokens: int | None) -> Sequence | Refusal:
        """Takes the blocks of a prompt; `growth_tokens` is None if it is computed here."""
        can, longest = self._constrain is not None, self.max_model_len
        if (refusal := misfit(spec, self.spec, longest, can_constrain=can)) is not None:
            return refusal
        num_tokens = len(spec.token_ids)
        chain = HashChain(spec.root_hash, self.block_size, spec.token_ids)
        scores_prompt = spec.sampling.num_prompt_logprobs >= 0
        reusable = 0 if scores_prompt else self._num_reusable(num_tokens)
        kv = self._cache.resume(chain.hashes[:reusable])
        num_cached = kv.num_sealed * self.block_size
        try:
            if growth_tokens is None:
                self._cache.grow(kv, num_cached, num_tokens, whole=True)
            else:
                growth = min(growth_tokens, self.max_model_len - num_tokens)
                self._cache.reserve(kv, num_tokens, growth)
        except OutOfBlocksError:
            self._cache.release(kv)
            return self._no_blocks(f"{num_tokens - num_cached} tokens need blocks")
        self._next_id += 1
        sequence = Sequence(
            sequence_id=self._next_id,
            spec=spec,
            tokens=list(spec.token_ids),
            kv=kv,
            num_computed=num_cached,
            num_cached=num_cached,
            chain=chain,
            constraint=self._constraint(spec),
            scores_prompt=scores_prompt,
        )
        self._held.add(sequence)
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached
        return sequence

    def _constraint(self, spec: SequenceSpec) -> TokenConstraint | None:
        structure = spec.sampling.structure
        if structure is None:
            return None
        assert self._constrain is not None, "checked by misfit"
        return self._constrain(structure)

    def _no_blocks(self, detail: str) -> Refusal:
        text = f"{detail}; {self.pool.num_free} are free"
        return Refusal(RefusalReason.NO_BLOCKS, text, retry_after_ms=50)

    def begin_fill(self, sequence: Sequence) -> PrefixFill:
        """Prepares a sequence that has computed nothing for a prefix from another worker."""
        return self.fills.begin_for(sequence, len(self.reusable_hashes(sequence)))

    def reusable_hashes(self, sequence: Sequence) -> SequenceOf[BlockHash]:
        """Returns the hashes of leading blocks that a sequence may take over before it computes."""
        reusable = 0 if sequence.scores_prompt else self._num_reusable(len(sequence.tokens))
        return sequence.chain.hashes[:reusable]

    def _num_reusable(self, num_tokens: int) -> int:
        # The last token is always computed, since its logits are needed for sampling.
        return (num_tokens - 1) // self.block_size

    # --- movement ----------------------------------------------------------------------------

    def run(self, sequence: Sequence) -> None:
        """Computes the sequence's missing KV, from the next step on."""
        assert sequence.state is SequenceState.HELD, sequence.state
        self._held.discard(sequence)
        self._running.add(sequence)

    def start_decode(self, sequence: Sequence, first_token: int) -> None:
        """Starts generation after a prefill worker has written all of the prompt's KV."""
        assert sequence.state is SequenceState.HELD, sequence.state
        sequence.num_computed = len(sequence.tokens)
        sequence.scores_prompt = False  # the prefill worker has scored it
        self._settle(sequence)
        sequence.append(first_token)
        self.run(sequence)

    def release(self, sequence: Sequence) -> None:
        """Ends a sequence, if it has not ended; its blocks are free after the step in flight."""
        if sequence.state is SequenceState.GONE:
            return
        self._leave(sequence)
        self._lost(sequence)
        sequence.state = SequenceState.GONE
        self._free_blocks(sequence)
        if sequence.upstream is not None and sequence not in self._in_flight:
            self._settle_upstream(sequence, came=False)
        sequence.on_end()

    def _lost(self, sequence: Sequence) -> None:
        self._gone.append(sequence.sequence_id)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.HELD:
            self._held.discard(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._running.discard(sequence)
        elif sequence.state is SequenceState.PREEMPTED:
            self._preempted.discard(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that is GONE, once no step and no writer uses them."""
        if sequence in self._in_flight:
            self._released_in_flight.append(sequence)
        elif not self.fills.defers(sequence):
            self._cache.release(sequence.kv, sequence.chain.hashes)

    def arriving_blocks(self, sequence: Sequence, num_cached: int) -> list[ArrivingBlock]:
        """Returns the blocks of a prompt that a handoff moves, in the order of the protocol.

        Args:
            num_cached: number of leading block indices that the receiver has.
        """
        num_tokens = len(sequence.spec.token_ids)
        span = range(num_cached, num_blocks_of(num_tokens, self.block_size))
        kv = sequence.kv
        return arriving_blocks(
            self.spec.groups, kv.tables, kv.state, span, num_tokens, self.block_size
        )

    # --- steps -------------------------------------------------------------------------------

    def set_rules(self, rules: StepRules) -> None:
        """Sets the rules that divide the next steps between prompts and decoding sequences."""
        self._running.rules = rules

    def plan_step(self) -> list[SequenceChunk]:
        """Returns the chunks of the next step; empty if there is nothing to do.

        Every call that returns chunks must be followed by `finish_step`.
        """
        assert not self._in_flight, "the step before is not finished"
        planned = self._running.plan()
        # Saved states take only blocks that are left after every sequence has the blocks it needs.
        for sequence, end in planned:
            if sequence.num_begun:
                continue  # they were chosen for its first step
            prompt = len(sequence.spec.token_ids)
            hashes = sequence.chain.hashes
            self._cache.plan_saves(sequence.kv, sequence.start, end, prompt, hashes)
        self._in_flight = self._running.latest
        return [self._chunk(sequence, end) for sequence, end in planned]

    def take_gone(self) -> list[int]:
        """Returns ids for `ModelRunner.forget` before the planned step, each once."""
        gone, self._gone = self._gone, []
        return gone

    def _chunk(self, sequence: Sequence, end: int) -> SequenceChunk:
        kv, upstream = sequence.kv, sequence.upstream
        return SequenceChunk(
            sequence_id=sequence.sequence_id,
            token_ids=sequence.tokens,
            start=sequence.start,
            end=end,
            block_table=kv.tables[0],
            num_prompt_tokens=sequence.spec.num_prompt_tokens,
            sampling=sequence.spec.sampling,
            sample=end == len(sequence.tokens),
            eos_token_ids=self.spec.eos_token_ids,
            more_tables=kv.tables[1:],
            state=state_chunk(sequence) if kv.state else None,
            constraint=sequence.constraint,
            score_prompt=sequence.scores_prompt,
            on_layers=sequence.on_layers if end == len(sequence.tokens) else None,
            remote=sequence.remote,
            pace=self._running.pace_of(sequence),
            upstream=upstream,
            adapter=sequence.spec.adapter,
            embedding=sequence.spec.embedding,
        )

    def _num_reusable_again(self, sequence: Sequence) -> int:
        reusable = self._num_reusable(len(sequence.tokens))
        if sequence.scores_prompt:  # continue after the last scored position
            reusable = min(reusable, len(sequence.prompt_logprobs) // self.block_size)
        return reusable

    def finish_step(self, chunks: SequenceOf[SequenceChunk], result: StepResult) -> None:
        """Records the runner's result and notifies the sequences' listeners."""
        assert len(chunks) == len(result.tokens)
        members = {sequence.sequence_id: sequence for sequence in self._in_flight}
        self._in_flight = frozenset()
        self._steps += 1
        notify: list[Callable[[], None]] = []
        for index, (chunk, token) in enumerate(zip(chunks, result.tokens, strict=True)):
            sequence = members[chunk.sequence_id]
            if self._goes_on(sequence, result.unfinished.get(index)):
                notify.append(sequence.on_progress)
                continue
            self._computed_tokens += chunk.end - chunk.start
            if sequence.upstream is not None:
                came = index not in result.lost and index not in result.unfinished
                self._settle_upstream(sequence, came=came)
            elif index in result.lost:
                come_back(sequence, self.block_size)
            if index in result.lost or index in result.unfinished:
                continue
            known = len(sequence.prompt_logprobs) - chunk.start  # recomputed after preemption
            sequence.prompt_logprobs += result.prompt_logprobs.get(index, ())[known:]
            if sequence.state is not SequenceState.RUNNING:
                continue
            if token is not None and token.damaged:
                notify += self._damage(sequence)
            else:
                notify += self._advance(sequence, chunk.end, token)
        released, self._released_in_flight = self._released_in_flight, []
        for sequence in released:
            self._free_blocks(sequence)
        # Listeners come last: they may admit and release, which needs consistent records.
        for call in notify:
            call()

    def _goes_on(self, sequence: Sequence, num_stages: int | None) -> bool:
        """Records the progress of a part; False if it has ended, or its sequence no longer runs."""
        is_unfinished = num_stages is not None and sequence.state is SequenceState.RUNNING
        sequence.num_begun = 1 + num_stages if num_stages is not None and is_unfinished else 0
        return is_unfinished

    def _settle_upstream(self, sequence: Sequence, *, came: bool) -> None:
        """A part has ended beside which another worker computed the beginning of the prompt."""
        upstream, sequence.upstream = sequence.upstream, None
        assert upstream is not None
        sequence.is_part = False
        if not came:
            self._cache.drop_saves(sequence.kv)
        if not came and sequence.state is SequenceState.RUNNING:
            # A writer may still be in its blocks: `settle` runs the sequence again after that.
            self._running.discard(sequence)
            sequence.state = SequenceState.HELD
            self._held.add(sequence)
        upstream.settle(came)

    def _advance(
        self, sequence: Sequence, end: int, token: SampledToken | None
    ) -> list[Callable[[], None]]:
        sequence.num_computed = end
        self._settle(sequence)
        if token is None:
            return [sequence.on_progress]
        position = len(sequence.tokens)
        sequence.append(token.token_id)
        self._generated_tokens += 1
        finish = self._finish_reason(sequence, token)
        scores = tuple(sequence.prompt_logprobs) if sequence.scores_prompt else ()
        told = (token.token_id, position, token.logprobs, finish, token.error, scores)
        emission = Emission(*told, embedding=token.embedding)
        if sequence.scores_prompt:
            sequence.scores_prompt = False
            sequence.prompt_logprobs.clear()
        if finish is not None:
            self.release(sequence)
        elif sequence.hold_after_first:
            self._running.discard(sequence)
            sequence.state = SequenceState.HELD
            self._held.add(sequence)
        # Bound now: the calls before it may replace the listener.
        listener = sequence.on_emission
        return [lambda: listener(emission)]

    def _damage(self, sequence: Sequence) -> list[Callable[[], None]]:
        """Ends a sequence with damaged logits and evicts its cached KV."""
        self._damaged += 1
        self.release(sequence)
        cached = self.pool.evict_first(sequence.chain.hashes)
        # States are cached under other hashes: with states, the whole cache is cleared.
        self.pool.clear_cached(cached if self.spec.groups.is_plain else None)
        reason, position = FinishReason.ERROR, len(sequence.tokens)
        emission = Emission(0, position, None, reason, _NOT_NUMBERS, damaged=True)
        listener = sequence.on_emission
        return [lambda: listener(emission)]

    def _settle(self, sequence: Sequence) -> None:
        """Registers completed blocks for sharing, and gives back blocks before a window."""
        if sequence.remote is not None:
            return  # no match can reach the blocks after a hole
        num_sealed = sequence.kv.num_sealed
        self._cache.finish_step(sequence.kv, sequence.num_computed, sequence.chain.hashes)
        if self.on_sealed is not None and sequence.kv.num_sealed > num_sealed:
            self.on_sealed(sequence, num_sealed)

    def _finish_reason(self, sequence: Sequence, token: SampledToken) -> FinishReason | None:
        if token.error:
            return FinishReason.ERROR
        token_id = token.token_id
        sampling = sequence.spec.sampling
        if sequence.num_generated > sampling.min_tokens:
            is_eos = token_id in self.spec.eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        is_full = len(sequence.tokens) >= self.max_model_len
        if is_full or sequence.num_generated >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    # --- state -------------------------------------------------------------------------------

    @property
    def max_step_tokens(self) -> int:
        """Maximum number of tokens that one step computes (the chunk budget)."""
        return self._limits.max_tokens

    @property
    def token_totals(self) -> tuple[int, int]:
        """Numbers of tokens computed and generated since start."""
        return self._computed_tokens, self._generated_tokens

    @property
    def pending_tokens(self) -> int:
        """Number of prompt tokens to compute; the single token of a decode step does not count."""
        waiting = (each.num_remaining for each in (*self._running, *self._preempted))
        return sum(count for count in waiting if count > 1)

    @property
    def has_work(self) -> bool:
        """Whether `plan_step` may return chunks."""
        return bool(self._running or self._preempted)

    @property
    def is_idle(self) -> bool:
        """Whether there is no sequence and no referenced block."""
        is_busy = self._held or self._running or self._preempted or self._in_flight
        return not is_busy and self.pool.is_idle

    @property
    def adapters_in_use(self) -> set[str]:
        """Ids of the adapters of all sequences that have not ended; "" for those without one."""
        everyone = (*self._held, *self._running, *self._preempted, *self._in_flight)
        return {each.spec.adapter for each in everyone}

    def queues(self) -> tuple[QueueLengths, QueueLengths]:
        """Returns the sequences of prefill and of decode, by the reason of their waiting."""
        return queue_lengths(self._held, self._running, self._preempted)

    def statistics(self) -> EngineStatistics:
        """Returns counters and gauges."""
        return EngineStatistics(
            num_running=len(self._running),
            num_held=len(self._held),
            num_preempted=len(self._preempted),
            blocks_free=self.pool.num_free,
            prompt_tokens_total=self._prompt_tokens,
            cached_tokens_total=self._cached_tokens,
            computed_tokens_total=self._computed_tokens,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=self._running.num_preemptions,
            steps_total=self._steps,
            damaged_total=self._damaged,
            swap=self._swap.statistics() if self._swap is not None else SwapStatistics(),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the records contradict each other."""
        self.pool.check_integrity()
        self._preempted.check_integrity()
        everyone = [*self._held, *self._running, *self._preempted]
        assert len({s.sequence_id for s in everyone}) == len(everyone), "a sequence is twice here"
        for sequence in everyone:
            if sequence.state is SequenceState.PREEMPTED or sequence.remote is not None:
                continue
            assert sequence.num_computed <= len(sequence.tokens)
            assert sequence.kv.num_sealed * self.block_size <= len(sequence.tokens)
            self._cache.check_integrity(sequence.kv, sequence.num_computed)
