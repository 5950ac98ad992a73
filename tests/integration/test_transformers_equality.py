"""Tokens equal those of transformers, however the work is cut into steps, batches and blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvmesh.core.types import SamplingParams
from kvmesh.engine import layers
from kvmesh.engine.protocol import ModelRunner, SampledToken, SequenceChunk, StateChunk
from kvmesh.kernels import host, linear
from kvmesh.kernels.host_library import load_host_library
from tests.integration.families import (
    FOR_ALL,
    GREEDY,
    NEW_TOKENS,
    NUM_BLOCKS,
    OF_EACH_KIND,
    PROMPT_LENGTHS,
    WITH_A_LONG_ONE,
    Checkpoint,
)
from tests.integration.family_configs import CONFIGS
from tests.unit.kernels.no_copies import no_copies


@dataclass
class Home:
    """Blocks of one sequence in all groups; those behind a window stay here."""

    tables: list[list[int]]
    state: list[int]

    @property
    def all_blocks(self) -> list[int]:
        return [block for table in (*self.tables, self.state) for block in table]


class Homes:
    """Disjoint blocks of a pool, in no order."""

    def __init__(self, runner: ModelRunner) -> None:
        self._groups = runner.spec.groups
        self._size = runner.spec.layout.block_size
        self._free = list(range(NUM_BLOCKS))
        random.Random(11).shuffle(self._free)

    def take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def home(self, num_prompt_tokens: int) -> Home:
        count = -(-(num_prompt_tokens + NEW_TOKENS) // self._size)
        tables = [self.take(count) for _ in self._groups.windows]
        return Home(tables, self.take(self._groups.state_blocks))

    def homes(self, lengths: Sequence[int]) -> list[Home]:
        return [self.home(length) for length in lengths]


class Stream:
    """One sequence and its blocks."""

    def __init__(
        self, prompt: Sequence[int], home: Home, sampling: SamplingParams = GREEDY
    ) -> None:
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.home = home
        self.sampling = sampling
        self.computed = 0
        self.source: list[int] = []
        self.saves: list[tuple[int, list[int]]] = []

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def next_chunk(self, max_tokens: int) -> SequenceChunk:
        end = min(self.computed + max_tokens, len(self.tokens))
        return SequenceChunk(
            sequence_id=id(self),
            token_ids=self.tokens,
            start=self.computed,
            end=end,
            block_table=self.home.tables[0],
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            sample=end == len(self.tokens),
            more_tables=self.home.tables[1:],
            state=self._state(end) if self.home.state else None,
        )

    def _state(self, end: int) -> StateChunk:
        saves = [save for save in self.saves if self.computed < save[0] <= end]
        return StateChunk(self.home.state, self.source, saves)


def run(
    runner: ModelRunner, streams: Sequence[Stream], chunk: int, num_tokens: int = NEW_TOKENS
) -> None:
    """Steps all streams together until each has its tokens; they get there at different times."""
    while unfinished := [stream for stream in streams if len(stream.output) < num_tokens]:
        chunks = [stream.next_chunk(chunk) for stream in unfinished]
        result = runner.execute(chunks)
        for stream, done, token in zip(unfinished, chunks, result.tokens, strict=True):
            stream.computed = done.end
            stream.source = stream.home.state
            assert (token is not None) == done.sample
            if token is not None:
                stream.tokens.append(token.token_id)


# Sampling from logits and the places of a sequence's blocks do not depend on the inside of a layer.
of_some_families = pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(name, marks=[] if name in FOR_ALL else pytest.mark.long) for name in CONFIGS],
    indirect=True,
)


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Behind every window and every original length; each kind of layer has a longer prompt, too.
    lengths = WITH_A_LONG_ONE if request.param in OF_EACH_KIND else (*PROMPT_LENGTHS, 1100)
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"), lengths)


def test_alone(checkpoint: Checkpoint) -> None:
    runner = checkpoint.runner()
    for prompt, expected in zip(checkpoint.prompts, checkpoint.expected, strict=True):
        stream = Stream(prompt, Homes(runner).home(len(prompt)))
        run(runner, [stream], chunk=4096)
        assert stream.output == expected


def test_logits_in_fp32_and_bf16(checkpoint: Checkpoint) -> None:
    prompt = checkpoint.prompts[4]
    exact = checkpoint.prompt_logprobs(prompt, torch.float32)
    found = {
        dtype: prompt_logprobs(checkpoint.runner(dtype), prompt)
        for dtype in ("float32", "bfloat16")
    }
    torch.testing.assert_close(found["float32"], exact, rtol=0, atol=5e-3)
    # Rounding moves choices of experts; it may not move more here than it does there.
    theirs = (checkpoint.prompt_logprobs(prompt, torch.bfloat16) - exact).abs().mean()
    assert (found["bfloat16"] - exact).abs().mean() < 2 * theirs


def prompt_logprobs(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    stream = Stream(prompt, Homes(runner).home(len(prompt)), replace(GREEDY, num_prompt_logprobs=0))
    result = runner.execute([replace(stream.next_chunk(4096), score_prompt=True)])
    return torch.tensor([entry.logprob for entry in result.prompt_logprobs[0]])


# Sampled, the same prompts run in chunks of 300 below.
@pytest.mark.parametrize(
    "chunk", [19, *(pytest.param(chunk, marks=pytest.mark.long) for chunk in (256, 1000))]
)
def test_batched_in_chunks_over_scattered_blocks(checkpoint: Checkpoint, chunk: int) -> None:
    runner = checkpoint.runner()
    homes = Homes(runner).homes([len(prompt) for prompt in checkpoint.prompts])
    streams = [Stream(*pair) for pair in zip(checkpoint.prompts, homes, strict=True)]
    run(runner, streams, chunk)
    assert [stream.output for stream in streams] == checkpoint.expected


def test_prefix_blocks_of_another_sequence(checkpoint: Checkpoint) -> None:
    runner = checkpoint.runner()
    base = checkpoint.prompts[4]
    homes, size = Homes(runner), runner.spec.layout.block_size
    shared_blocks = 144 // size
    first, home = Stream(base, homes.home(len(base))), homes.home(500)
    saved = homes.take(runner.spec.groups.state_blocks)
    first.saves = [(shared_blocks * size, saved)]
    run(runner, [first], chunk=4096)
    prompt = base[: shared_blocks * size] + checkpoint.prompts[3]
    home.tables = [
        old[:shared_blocks] + new for old, new in zip(first.home.tables, home.tables, strict=True)
    ]
    second = Stream(prompt, home)
    second.computed, second.source = shared_blocks * size, saved
    run(runner, [second], chunk=20)
    assert second.output == checkpoint.continue_greedily(prompt)


SEEDED = [
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, top_k=20, seed=4),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, seed=5),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=6),
    GREEDY,
    SamplingParams(temperature=1.1, top_k=50, top_p=0.9, seed=7),
]


@of_some_families
def test_seeded_sampling_is_the_same_alone_batched_and_chunked(checkpoint: Checkpoint) -> None:
    runner = checkpoint.runner()
    homes = Homes(runner).homes([len(prompt) for prompt in checkpoint.prompts])
    alone = [Stream(*parts) for parts in zip(checkpoint.prompts, homes, SEEDED, strict=True)]
    for stream in alone:
        run(runner, [stream], chunk=4096)
    batched = [Stream(*parts) for parts in zip(checkpoint.prompts, homes, SEEDED, strict=True)]
    run(runner, batched, chunk=300)
    assert [stream.output for stream in batched] == [stream.output for stream in alone]
    assert alone[0].output != checkpoint.expected[0], "the noise has an effect"


@of_some_families
def test_a_moved_stream_goes_on_with_the_same_tokens(checkpoint: Checkpoint) -> None:
    prompt, sampling = checkpoint.prompts[4], SEEDED[5]
    source, target = checkpoint.runner(), checkpoint.runner()
    home, other_home = Homes(source).homes([len(prompt), len(prompt)])
    stay, leave = Stream(prompt, home, sampling), Stream(prompt, other_home, sampling)
    run(source, [stay], chunk=100)
    run(source, [leave], chunk=4096, num_tokens=5)
    for here, there in zip(other_home.all_blocks, home.all_blocks, strict=True):
        target.kv.write_view(there, 1)[:] = source.kv.read_view(here, 1)
        target.kv.written(there, 1)
    leave.home, leave.source = home, home.state
    run(target, [leave], chunk=4096)
    assert leave.output == stay.output


@of_some_families
def test_recomputed_elsewhere_goes_on_with_the_same_tokens(checkpoint: Checkpoint) -> None:
    prompt, sampling = checkpoint.prompts[4], SEEDED[2]
    runner = checkpoint.runner()
    home = Homes(runner).home(len(prompt))
    stay, moved = Stream(prompt, home, sampling), Stream(prompt, home, sampling)
    run(runner, [stay], chunk=4096)
    moved.tokens += stay.output[:7]
    run(runner, [moved], chunk=64)
    assert moved.output == stay.output


SHORT = (95, 80, 33, 17)
"""Prompts whose longest fills the blocks that a static step's tables have room for."""


BY_TWINS = ("gemma2",)
"""Families whose scores are computed by the twins: sums over tables of other widths round apart.

Without the C++ library all are."""


def short_streams(checkpoint: Checkpoint, homes: Homes) -> list[Stream]:
    prompt = checkpoint.prompts[4]
    params = [
        replace(GREEDY, num_logprobs=5),
        SEEDED[0],
        replace(SEEDED[2], num_logprobs=5),
        replace(SEEDED[3], num_logprobs=0),
    ]
    return [
        Stream(prompt[:length], homes.home(length), sampling)
        for length, sampling in zip(SHORT, params, strict=True)
    ]


@of_some_families
def test_static_steps_are_plain_steps_bit_for_bit(checkpoint: Checkpoint) -> None:
    runner = checkpoint.runner(max_model_len=SHORT[0] + 1)
    homes = Homes(runner)
    streams = short_streams(checkpoint, homes)
    saved = homes.take(runner.spec.groups.state_blocks)
    run(runner, streams, chunk=100, num_tokens=1)
    streams[2].saves = [(SHORT[2] + 1, saved)]
    before, after = runner.kv.tensor.clone(), []
    found: list[list[SampledToken | None]] = []
    for batch in (4, 3):
        chunks = [stream.next_chunk(1) for stream in streams[:batch]]
        for max_batch in (0, 4):
            runner.kv.tensor.copy_(before)
            runner.use_static_steps(max_batch)
            found.append(runner.execute(chunks).tokens)
            after.append(runner.kv.tensor.clone())
    if checkpoint.name not in BY_TWINS and load_host_library() is not None:
        assert found[1] == found[0]
        assert torch.equal(after[1], after[0])
    torch.testing.assert_close(after[1], after[0], rtol=1e-4, atol=1e-4)
    assert token_ids(found[1]) == token_ids(found[0])
    # A row that is nobody's writes nowhere; what is computed beside it may round otherwise.
    untouched = streams[3].home.all_blocks
    assert torch.equal(after[3][untouched], before[untouched])
    torch.testing.assert_close(after[3], after[2], rtol=1e-4, atol=1e-4)
    assert token_ids(found[3]) == token_ids(found[2])


def token_ids(tokens: Sequence[SampledToken | None]) -> list[int]:
    assert None not in tokens
    return [token.token_id for token in tokens if token is not None]


@of_some_families
def test_static_steps_among_steps_with_prompts(checkpoint: Checkpoint) -> None:
    runner = checkpoint.runner()
    homes = Homes(runner).homes(PROMPT_LENGTHS)
    plain = [Stream(*parts) for parts in zip(checkpoint.prompts, homes, SEEDED, strict=False)]
    run(runner, plain, chunk=100)
    runner.use_static_steps(4)
    static = [Stream(*parts) for parts in zip(checkpoint.prompts, homes, SEEDED, strict=False)]
    run(runner, static, chunk=100)
    assert [stream.output for stream in static] == [stream.output for stream in plain]


@of_some_families
def test_a_static_step_never_looks_at_values(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a device: plain weights, experts stacked, nothing that reads memory by its address.
    monkeypatch.setattr(linear, "can_pack", lambda _: False)
    monkeypatch.setattr(host, "has_vectors", lambda _: False)
    monkeypatch.setattr(layers, "stacks_experts", lambda _: True)
    runner = checkpoint.runner(max_model_len=64)
    runner.use_static_steps(4)
    stream = Stream(checkpoint.prompts[3], Homes(runner).home(33))
    run(runner, [stream], chunk=64, num_tokens=4)
    assert stream.output == checkpoint.expected[3][:4]
    step = runner._static
    assert step is not None
    # These tensors have shapes and no values: to wait for one is an error.
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), no_copies():
        step.compute(step.buckets[-1])
