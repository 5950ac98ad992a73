"""Families whose layers keep different things: preempted, resumed, handed over, moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.swap_space import SwapSpace
from kvmesh.kv.groups import blocks_at_most
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits
from kvmesh.policy.prompt_time import PromptTime
from tests.integration.families import BLOCK_SIZE, GREEDY, NEW_TOKENS, OF_EACH_KIND, Checkpoint

CHUNK = 40


@pytest.fixture(scope="module", params=OF_EACH_KIND)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


class Worker:
    """A runner and the bookkeeping of its blocks; one that swaps has static steps too."""

    def __init__(
        self, checkpoint: Checkpoint, num_blocks: int, *, swaps: bool = False, chunk: int = CHUNK
    ) -> None:
        self.runner = TorchRunner.load(
            checkpoint.folder, served_name="tiny", num_blocks=num_blocks, block_size=BLOCK_SIZE
        )
        if swaps:
            self.runner.use_static_steps(4)
        block_bytes = self.runner.spec.layout.block_bytes
        # On a clock that stands still copies are free.
        arena = HostArena(self.runner.kv, block_bytes, num_blocks)
        space = SwapSpace(arena, PromptTime(chunk), ManualClock())
        self.core = EngineCore(
            self.runner.spec,
            num_blocks,
            BatchLimits(max_tokens=chunk),
            growth_tokens=0,
            state_interval_tokens=96,
            swap=space if swaps else None,
        )

    def spec(self, tokens: list[int], sampling: SamplingParams = GREEDY) -> SequenceSpec:
        params = replace(sampling, max_tokens=NEW_TOKENS)
        return SequenceSpec(tuple(tokens), len(tokens), params, root_hash("test"))

    def admit(self, tokens: list[int]) -> Sequence:
        sequence = self.core.admit_decode(self.spec(tokens))
        assert isinstance(sequence, Sequence), sequence
        return sequence

    def step(self) -> None:
        chunks = self.core.plan_step()
        self.core.finish_step(chunks, self.runner.execute(chunks))
        self.core.check_integrity()

    def finish(self) -> None:
        while self.core.has_work:
            self.step()

    def generate(self, tokens: list[int]) -> tuple[list[int], int]:
        """Output, and tokens that were cached."""
        sequence = self.admit(tokens)
        self.core.run(sequence)
        self.finish()
        return sequence.tokens[len(tokens) :], sequence.num_cached


def test_a_cached_prefix_gives_the_same_tokens(checkpoint: Checkpoint) -> None:
    worker = Worker(checkpoint, 600)
    prompt = checkpoint.prompts[4]
    size = worker.core.block_size
    first, cached = worker.generate(prompt)
    assert (first, cached) == (checkpoint.expected[4], 0)
    again, cached = worker.generate(prompt)
    assert (again, cached) == (first, 249 // size * size)
    # The next turn of a chat goes on behind the answer, another one branches off before it.
    turn = prompt + first + checkpoint.prompts[3]
    output, cached = worker.generate(turn)
    assert output == checkpoint.continue_greedily(turn)
    assert cached >= 249 // size * size
    branch = prompt[:200] + checkpoint.prompts[3]
    output, cached = worker.generate(branch)
    assert output == checkpoint.continue_greedily(branch)
    assert cached >= 192 - size
    assert worker.core.is_idle


@pytest.mark.parametrize("swaps", [False, True])
def test_preempted_sequences_get_the_same_tokens(checkpoint: Checkpoint, swaps: bool) -> None:
    prompts = [[(token + shift) % 320 for token in checkpoint.prompts[4]] for shift in range(3)]
    roomy = Worker(checkpoint, 600)
    held = [roomy.admit(prompt) for prompt in prompts]
    # Room for the prompts and nothing else: growth, or a window in front of a chunk, finds none.
    groups, size = roomy.core.spec.groups, roomy.core.block_size
    alone = blocks_at_most(groups, 250 + NEW_TOKENS, CHUNK, size)
    tight = Worker(checkpoint, max(alone, 600 - roomy.core.pool.num_free), swaps=swaps)
    for sequence in held:
        roomy.core.release(sequence)
    sequences = [tight.admit(prompt) for prompt in prompts]
    for sequence in sequences:
        tight.core.run(sequence)
    tight.finish()
    now = tight.core.statistics()
    assert now.preemptions_total > 0
    assert now.swap.swapped_in_total == now.swap.swapped_out_total
    assert (now.swap.swapped_in_total > 0) is swaps
    assert now.swap.blocks_kept == 0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.tokens[len(prompt) :] == checkpoint.continue_greedily(prompt)
    assert tight.core.is_idle


def hand_over(prefill: Worker, decode: Worker, prompt: list[int]) -> Sequence:
    """The sequence on the decode worker, which has the first token and all KV."""
    target = decode.admit(prompt)
    source = prefill.core.admit_prefill(prefill.spec(prompt))
    assert isinstance(source, Sequence)
    prefill.finish()
    first = target.num_cached // decode.core.block_size
    places = decode.core.arriving_blocks(target, first)
    sent = prefill.core.arriving_blocks(source, first)
    assert [each.tokens for each in places] == [each.tokens for each in sent]
    for there, here in zip(places, sent, strict=True):
        decode.runner.kv.write_view(there.block, 1)[:] = prefill.runner.kv.read_view(here.block, 1)
        decode.runner.kv.written(there.block, 1)
    decode.core.start_decode(target, source.tokens[-1])
    prefill.core.release(source)
    return target


@pytest.mark.parametrize("cached_tokens", [0, 200])
def test_handed_over_sequences_get_the_same_tokens(
    checkpoint: Checkpoint, cached_tokens: int
) -> None:
    prefill, decode = Worker(checkpoint, 600), Worker(checkpoint, 600)
    prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
    if cached_tokens:
        for worker in (prefill, decode):
            worker.generate(prompt[:cached_tokens])
    target = hand_over(prefill, decode, prompt)
    assert (target.num_cached > 0) == (cached_tokens > 0)
    decode.finish()
    assert target.tokens[len(prompt) :] == expected
    assert prefill.core.is_idle
    assert decode.core.is_idle


@settings(max_examples=3, deadline=None)
@given(
    length=st.integers(1, 120),
    shared=st.tuples(st.integers(0, 120), st.integers(0, 120)),
    chunk=st.integers(1, 50),
    moves_after=st.integers(1, NEW_TOKENS - 1),
)
def test_any_lengths_prefixes_chunks_and_moves_give_the_same_tokens(
    checkpoint: Checkpoint, length: int, shared: tuple[int, int], chunk: int, moves_after: int
) -> None:
    """Disaggregated, each worker with a prefix of its own, then moved while it generates."""
    prompt = checkpoint.prompts[4][:length]
    workers = [Worker(checkpoint, 300, chunk=chunk) for _ in range(2)]
    for worker, common in zip(workers, shared, strict=True):
        worker.generate(prompt[:common] + [7] * 3)
    prefill, decode = workers
    sequence = hand_over(prefill, decode, prompt)
    while len(sequence.tokens) < length + moves_after:
        decode.step()
    so_far = list(sequence.tokens)
    decode.core.release(sequence)
    # It goes on where its prompt was computed, prefix and state with it.
    spec = replace(prefill.spec(so_far), num_prompt_tokens=length)
    moved = prefill.core.admit_decode(spec)
    assert isinstance(moved, Sequence)
    prefill.core.run(moved)
    prefill.finish()
    assert moved.tokens[length:] == checkpoint.continue_greedily(prompt)
    assert prefill.core.is_idle
    assert decode.core.is_idle


def test_a_moved_stream_goes_on(checkpoint: Checkpoint) -> None:
    prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
    worker = Worker(checkpoint, 600)
    spec = replace(worker.spec(prompt + expected[:5]), num_prompt_tokens=len(prompt))
    sequence = worker.core.admit_decode(spec)
    assert isinstance(sequence, Sequence)
    worker.core.run(sequence)
    worker.finish()
    assert sequence.tokens[len(prompt) :] == expected


def test_windows_hold_less_than_the_whole_context(checkpoint: Checkpoint) -> None:
    worker = Worker(checkpoint, 600)
    sequence = worker.admit(checkpoint.prompts[4])
    worker.core.run(sequence)
    most = 0
    while worker.core.has_work:
        worker.step()
        most = max(most, 600 - worker.core.pool.num_free)
    groups, size = worker.core.spec.groups, worker.core.block_size
    whole = -(-(250 + NEW_TOKENS) // size)
    # The window's end is reserved beside the window in front of the chunk.
    bound = sum(
        min(whole, 2 * (40 // size + 2) + CHUNK // size + 1) if window else whole
        for window in groups.windows
    )
    assert most <= bound + 4 * groups.state_blocks
