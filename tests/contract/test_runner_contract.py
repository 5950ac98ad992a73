"""What every `ModelRunner` promises to the step loop and the data channel.

vLLM's blocks are eight times as long as those of the others here, and so are its prompts.
"""

from __future__ import annotations

import itertools
import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.types import SamplingParams, TokenLogprobs
from kvmesh.engine.adapters import Adapter, read_adapter
from kvmesh.engine.fake import FakeDevice, FakePlaces, FakeRunner
from kvmesh.engine.protocol import ModelRunner, SampledToken, SequenceChunk
from kvmesh.engine.runner import TorchRunner
from tests.engine_alone import embedded
from tests.unit.engine.tiny_checkpoint import write_checkpoint
from tests.vllm_engine import load_vllm, needs_vllm, write_adapter, write_vllm_checkpoint

VOCAB_SIZE = 64
NUM_BLOCKS = 24
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=30, seed=7)
PROMPT_LENGTH = 23
VLLM_BLOCK_SIZE = 32
MAX_RANK = 16


def make_runner(kind: str, folder: Path, max_adapters: int = 0) -> ModelRunner:
    if kind == "fake":
        device = FakeDevice(places=FakePlaces(max_adapters, MAX_RANK))
        return FakeRunner(
            vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=device
        )
    if kind == "vllm":
        checkpoint = write_vllm_checkpoint(folder / "checkpoint")
        return load_vllm(
            checkpoint, num_blocks=NUM_BLOCKS, dtype="float32", max_adapters=max_adapters
        )
    torch.set_num_threads(1)
    checkpoint = write_checkpoint(folder / "checkpoint")
    return TorchRunner.load(
        checkpoint,
        served_name="tiny",
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )


def scale_of(runner: ModelRunner) -> int:
    """How many times as long as `BLOCK_SIZE` its blocks are."""
    return runner.spec.layout.block_size // BLOCK_SIZE


def prompt_of(runner: ModelRunner) -> list[int]:
    """23 tokens for each token that a quarter of a block holds."""
    return random.Random(1).choices(range(3, VOCAB_SIZE), k=PROMPT_LENGTH * scale_of(runner))


def scaled(runner: ModelRunner, bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(bound * scale_of(runner) for bound in bounds)


# The first test that loads vLLM waits for its imports.
_VLLM = pytest.param("vllm", marks=[needs_vllm, pytest.mark.timeout(600)])


@pytest.fixture(params=["fake", "kvmesh", _VLLM])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(kind: str, tmp_path: Path) -> Iterator[ModelRunner]:
    made = make_runner(kind, tmp_path)
    yield made
    made.close()


@pytest.fixture
def other_runner(kind: str, tmp_path: Path) -> Iterator[ModelRunner]:
    """Another worker with the same model."""
    made = make_runner(kind, tmp_path)
    yield made
    made.close()


@dataclass
class Line:
    """A sequence that is driven by hand."""

    sequence_id: int
    tokens: list[int]
    block_table: list[int]
    sampling: SamplingParams = GREEDY
    adapter: str = ""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    def chunk(self, start: int, end: int) -> SequenceChunk:
        return SequenceChunk(
            sequence_id=self.sequence_id,
            token_ids=self.tokens,
            start=start,
            end=end,
            block_table=self.block_table,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            sample=end == len(self.tokens),
            adapter=self.adapter,
        )


def generate(
    runner: ModelRunner, line: Line, count: int, bounds: tuple[int, ...] = (), start: int = 0
) -> list[SampledToken]:
    """Computes the tokens in chunks that end at `bounds`, then decodes `count` tokens."""
    found: list[SampledToken] = []
    for bound in (*bounds, len(line.tokens)):
        (token,) = runner.execute([line.chunk(start, bound)]).tokens
        start = bound
        assert (token is None) == (bound < len(line.tokens))
        if token is not None:
            found.append(token)
    while len(found) < count:
        line.tokens.append(found[-1].token_id)
        end = len(line.tokens)
        (token,) = runner.execute([line.chunk(end - 1, end)]).tokens
        assert token is not None
        found.append(token)
    return found


def ids(tokens: list[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


CONTIGUOUS = list(range(8))
SCATTERED = [17, 3, 20, 9, 0, 14, 5, 11]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("bounds", [(4, 8, 20), (1, 2, 3), (22,), (7, 16)])
def test_chunking_and_block_placement_do_not_show(
    runner: ModelRunner, sampling: SamplingParams, bounds: tuple[int, ...]
) -> None:
    prompt = prompt_of(runner)
    whole = generate(runner, Line(1, list(prompt), CONTIGUOUS, sampling), 6)
    pieces = generate(runner, Line(2, list(prompt), SCATTERED, sampling), 6, scaled(runner, bounds))
    assert ids(pieces) == ids(whole)
    assert all(0 <= token < VOCAB_SIZE for token in ids(whole))
    assert all(token.logprobs is None for token in whole)


def test_what_else_is_in_the_batch_does_not_show(runner: ModelRunner) -> None:
    prompt, scale = prompt_of(runner), scale_of(runner)
    lines = [
        Line(1, list(prompt), [0, 1, 2, 3, 4, 5]),
        Line(2, prompt[5 * scale : 12 * scale], [10, 11], SAMPLED),
        Line(3, prompt[3:4], [20]),
    ]
    alone = [generate(runner, line, 1)[0] for line in lines]
    # The first one in the middle of its prompt beside two that sample.
    first = runner.execute(
        [lines[0].chunk(0, 9 * scale), lines[1].chunk(0, 7 * scale), lines[2].chunk(0, 1)]
    ).tokens
    assert first[0] is None
    rest = [lines[0].chunk(9 * scale, 23 * scale), lines[1].chunk(7 * scale - 1, 7 * scale)]
    second = runner.execute(rest).tokens
    assert [second[0], first[1], first[2]] == alone
    assert second[1] == alone[1], "computed again in its place"


def test_no_chunks_are_no_tokens(runner: ModelRunner) -> None:
    assert runner.execute([]).tokens == []


def test_positions_count(runner: ModelRunner) -> None:
    """The same tokens in another order are another sequence."""
    prompt = prompt_of(runner)
    same = generate(runner, Line(1, list(prompt), CONTIGUOUS), 8)
    other = generate(runner, Line(2, prompt[::-1], SCATTERED), 8)
    assert ids(same) != ids(other)


def test_a_draw_depends_on_seed_and_position_alone(runner: ModelRunner) -> None:
    hot = SamplingParams(temperature=2.0, seed=1)
    prompt = prompt_of(runner)
    whole = ids(generate(runner, Line(1, list(prompt), CONTIGUOUS, hot), 8))
    # A stream that moved: the tokens so far are part of what is prefilled.
    moved = Line(9, prompt + whole[:4], SCATTERED, hot)
    moved.num_prompt_tokens = len(prompt)
    assert ids(generate(runner, moved, 4, scaled(runner, (13,)))) == whole[4:]
    reseeded = SamplingParams(temperature=2.0, seed=2)
    assert ids(generate(runner, Line(1, list(prompt), CONTIGUOUS, reseeded), 8)) != whole


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_come_when_asked_for(runner: ModelRunner, count: int) -> None:
    sampling = SamplingParams(temperature=0.0, num_logprobs=count)
    for token in generate(runner, Line(1, prompt_of(runner), CONTIGUOUS, sampling), 3):
        assert token.logprobs is not None
        assert token.logprobs.logprob <= 0.0
        assert len(token.logprobs.top_ids) == len(token.logprobs.top_logprobs) == count
        assert list(token.logprobs.top_logprobs) == sorted(
            token.logprobs.top_logprobs, reverse=True
        )
        assert len(set(token.logprobs.top_ids)) == count
        if count:  # greedy: the best one was chosen
            assert token.logprobs.top_ids[0] == token.token_id


def test_views_are_the_layout(runner: ModelRunner) -> None:
    layout = runner.spec.layout
    assert layout.block_size % BLOCK_SIZE == 0
    assert runner.kv.num_blocks == NUM_BLOCKS
    for first, count in ((0, 1), (5, 3), (NUM_BLOCKS - 1, 1)):
        view = runner.kv.write_view(first, count)
        assert view.nbytes == count * layout.block_bytes
        assert not view.readonly
        assert view.contiguous
        assert runner.kv.read_view(first, count).nbytes == view.nbytes


def test_views_move_kv_to_another_runner(runner: ModelRunner, other_runner: ModelRunner) -> None:
    prompt = prompt_of(runner)
    expected = ids(generate(runner, Line(1, list(prompt), SCATTERED), 6))
    here, there = SCATTERED[:6], [2, 3, 4, 12, 13, 7]
    for source, target in zip(here, there, strict=True):
        view = other_runner.kv.write_view(target, 1)
        view.cast("B")[:] = runner.kv.read_view(source, 1).cast("B")
        other_runner.kv.written(target, 1)
        assert bytes(other_runner.kv.read_view(target, 1)) == bytes(runner.kv.read_view(source, 1))
    # The first token was chosen over there; here generation goes on over KV that was moved.
    line = Line(5, [*prompt, expected[0]], [*there, 8, 9])
    line.num_prompt_tokens = len(prompt)
    assert ids(generate(other_runner, line, 5, start=len(prompt))) == expected[1:]


def test_kv_that_is_wrong_shows(runner: ModelRunner) -> None:
    """So the tests above, and all that count on the fake, can fail."""
    prompt = prompt_of(runner)
    expected = ids(generate(runner, Line(1, list(prompt), CONTIGUOUS), 8))
    line = Line(1, [*prompt, expected[0]], CONTIGUOUS)
    view = runner.kv.write_view(2, 1).cast("B")
    view[:] = bytes(view.nbytes)
    runner.kv.written(2, 1)
    assert ids(generate(runner, line, 7, start=len(prompt))) != expected[1:]


def test_closing_twice_is_allowed(runner: ModelRunner) -> None:
    runner.close()
    runner.close()


def score(runner: ModelRunner, bounds: tuple[int, ...]) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt, computed in chunks that end at `bounds`."""
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=2)
    line = Line(1, prompt_of(runner), CONTIGUOUS, sampling)
    found: list[TokenLogprobs] = []
    start = 0
    for bound in (*scaled(runner, bounds), len(line.tokens)):
        chunk = line.chunk(start, bound)
        chunk.score_prompt = True
        found += runner.execute([chunk]).prompt_logprobs.get(0, [])
        start = bound
    return found


@pytest.mark.parametrize("bounds", [(5, 14), (22,), (1,)])
def test_prompt_tokens_are_scored_once_each_however_they_are_cut(
    runner: ModelRunner, bounds: tuple[int, ...]
) -> None:
    whole = score(runner, ())
    assert len(whole) == PROMPT_LENGTH * scale_of(runner) - 1
    parts = score(runner, bounds)
    assert [entry.top_ids for entry in parts] == [entry.top_ids for entry in whole]
    assert [entry.rank for entry in parts] == [entry.rank for entry in whole]
    for part, entry in zip(parts, whole, strict=True):
        assert part.logprob == pytest.approx(entry.logprob, abs=1e-4)


def test_scoring_a_prompt_does_not_change_what_is_said(runner: ModelRunner) -> None:
    scored = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    prompt = prompt_of(runner)
    chunks = [Line(n, list(prompt), CONTIGUOUS, scored).chunk(0, len(prompt)) for n in (1, 2)]
    chunks[1].block_table = [*range(8, 16)]
    chunks[1].score_prompt = True
    together = runner.execute(chunks)
    alone = runner.execute([Line(3, list(prompt), CONTIGUOUS).chunk(0, len(prompt))])
    assert together.tokens == [alone.tokens[0]] * 2
    assert list(together.prompt_logprobs) == [1]


@pytest.mark.parametrize("tells", [True, False])
def test_a_sequence_that_lost_its_blocks_comes_back_with_others(
    runner: ModelRunner, tells: bool
) -> None:
    """An id goes on in other blocks while another sequence has its old ones; told or not."""
    prompt, elsewhere = prompt_of(runner), list(range(8, 16))
    hot = SamplingParams(temperature=1.5, seed=3)
    whole = ids(generate(runner, Line(1, list(prompt), CONTIGUOUS, hot), 8))
    expected = ids(generate(runner, Line(4, prompt[::-1], elsewhere, hot), 6))
    generate(runner, Line(2, list(prompt), CONTIGUOUS, hot), 4)
    if tells:
        runner.forget([2, 77])
    taker = Line(3, prompt[::-1], CONTIGUOUS, hot)
    first = ids(generate(runner, taker, 1))
    back = Line(2, prompt + whole[:4], elsewhere, hot)
    back.num_prompt_tokens = len(prompt)
    assert ids(generate(runner, back, 4, scaled(runner, (9,)))) == whole[4:]
    taker.tokens += first
    rest = ids(generate(runner, taker, 5, start=len(prompt)))
    assert first + rest == expected


def test_a_sequence_may_sit_out_steps(runner: ModelRunner) -> None:
    prompt = prompt_of(runner)
    expected = [ids(generate(runner, Line(n, list(prompt), CONTIGUOUS), 4)) for n in (1, 2)]
    line, other = Line(3, list(prompt), CONTIGUOUS), Line(4, prompt[:5], [20, 21])
    for at in range(4):
        end = len(line.tokens)
        start = 0 if at == 0 else end - 1
        (token,) = runner.execute([line.chunk(start, end)]).tokens
        assert token is not None
        line.tokens.append(token.token_id)
        generate(runner, other, 1)  # a step without the first one
    assert line.tokens[len(prompt) :] == expected[0] == expected[1]


def test_adapters_come_and_go_between_steps(kind: str, tmp_path: Path) -> None:
    runner = make_runner(kind, tmp_path, max_adapters=2)
    places, prompt = runner.adapter_places, prompt_of(runner)
    if isinstance(runner, TorchRunner):
        assert places is None
        return
    assert places is not None
    assert places.num_places == 2
    one, two, three = (adapter_of_tiny(tmp_path / name, seed) for seed, name in enumerate("abc"))
    lines = itertools.count(1)

    def greedy(adapter: str = "") -> list[int]:
        return ids(
            generate(runner, Line(next(lines), list(prompt), CONTIGUOUS, GREEDY, adapter), 8)
        )

    plain = greedy()
    places.add(one)
    places.add(two)
    first, second = greedy(one.id), greedy(two.id)
    assert len({str(each) for each in (plain, first, second)}) == 3
    assert greedy() == plain
    places.remove(one.id)
    places.add(three)
    third = greedy(three.id)
    assert third not in (plain, first, second)
    assert greedy(two.id) == second
    places.remove(three.id)
    with pytest.raises(ConfigError, match="rank 32"):
        places.add(adapter_of_tiny(tmp_path / "long", 4, rank=32))
    if kind == "vllm":
        unfit = [
            ("hidden size of 48", adapter_of_tiny(tmp_path / "wide", 5, hidden=48)),
            ("vLLM does not take", adapter_of_tiny(tmp_path / "rows", 6, queries=4096)),
        ]
        for why, adapter in unfit:
            with pytest.raises(CheckpointError, match=why):
                places.add(adapter)
    places.add(one)
    assert [greedy(), greedy(one.id), greedy(two.id)] == [plain, first, second]
    runner.close()


def adapter_of_tiny(folder: Path, seed: int, **changes: int) -> Adapter:
    sizes = {"hidden": 32, "queries": 128, "values": 64, "layers": 2, **changes}
    return read_adapter(folder.name, write_adapter(folder, seed, **sizes))


def test_an_embedding_is_of_the_whole_prompt_however_it_is_cut(runner: ModelRunner) -> None:
    spec = runner.spec.embedding
    if isinstance(runner, TorchRunner):
        assert spec is None
        return
    assert spec is not None
    prompt = prompt_of(runner)
    prompts = [prompt, prompt[::-1], prompt[:-1]]
    (whole, *others) = [vector_of(each) for each in embedded(runner, prompts)]
    assert len(whole) == spec.size
    assert math.hypot(*whole) == pytest.approx(1, abs=1e-5)
    assert all(other != pytest.approx(whole, abs=1e-3) for other in others)
    (parts,) = embedded(runner, [prompt], max_tokens=9 * scale_of(runner))
    assert vector_of(parts) == pytest.approx(whole, abs=1e-5)
    # As cached as it can be, beside a sequence that wants none.
    runner.execute([Line(1, list(prompt), CONTIGUOUS).chunk(0, len(prompt))])
    line = Line(1, list(prompt), CONTIGUOUS).chunk(len(prompt) - 1, len(prompt))
    line.embedding = 0
    other = Line(2, list(prompt), list(range(8, 16))).chunk(0, len(prompt))
    token, without = runner.execute([line, other]).tokens
    assert token is not None
    assert vector_of(token.embedding) == pytest.approx(whole, abs=1e-5)
    assert without is not None
    assert without.embedding == b""


def vector_of(embedding: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))
