from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.core.errors import CheckpointError, ConfigError
from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import ModelRunner, SequenceChunk
from kvmesh.engine.runner import TorchRunner
from tests.unit.engine.tiny_checkpoint import write_checkpoint

GREEDY = SamplingParams(temperature=0.0, num_logprobs=0)


def load(folder: Path, **arguments: Any) -> TorchRunner:
    defaults: dict[str, Any] = {"served_name": "tiny", "num_blocks": 8, "block_size": 4}
    return TorchRunner.load(folder, **(defaults | arguments))


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[TorchRunner]:
    runner = load(write_checkpoint(tmp_path))
    yield runner
    runner.close()


def chunk(
    tokens: list[int], start: int, end: int, table: list[int], sample: bool = True
) -> SequenceChunk:
    return SequenceChunk(0, tokens, start, end, table, len(tokens), GREEDY, sample)


def test_spec_says_what_was_loaded(runner: TorchRunner) -> None:
    protocol: ModelRunner = runner
    spec = protocol.spec
    assert (spec.name, spec.vocab_size, spec.max_model_len) == ("tiny", 64, 128)
    assert spec.eos_token_ids == {2}
    layout = spec.layout
    assert (layout.dtype, layout.block_size, layout.num_layers) == ("float32", 4, 2)
    assert (layout.num_kv_heads, layout.head_dim) == (2, 8)
    assert len(layout.model_fingerprint) == 16
    assert protocol.kv.num_blocks == 8
    assert protocol.kv.read_view(0, 8).nbytes == 8 * layout.block_bytes


def test_one_result_per_chunk_in_order(runner: TorchRunner) -> None:
    assert runner.execute([]).tokens == []
    prompt = list(range(10, 20))
    mixed = [
        chunk(prompt, 0, 6, [0, 1], sample=False),
        chunk([5], 0, 1, [2]),
        chunk(prompt, 0, 10, [3, 4, 5]),
    ]
    first, second, third = runner.execute(mixed).tokens
    assert first is None
    alone = [runner.execute([mixed[1]]).tokens[0], runner.execute([mixed[2]]).tokens[0]]
    for token, expected in zip([second, third], alone, strict=True):
        assert token is not None
        assert expected is not None
        assert token.token_id == expected.token_id
        assert token.logprobs is not None
        assert expected.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-5)
    rest = runner.execute([chunk(prompt, 6, 10, [0, 1, 6])]).tokens[0]
    assert rest is not None
    assert third is not None
    assert rest.token_id == third.token_id


def test_only_the_chunks_slots_are_written(runner: TorchRunner) -> None:
    runner.kv.tensor.fill_(torch.nan)
    runner.execute([chunk([1, 2, 3, 4, 5, 6], 0, 6, [7, 2], sample=False)])
    written = ~runner.kv.tensor.isnan().flatten(4).any(-1)
    assert written.shape == (8, 2, 2, 4)
    expected = torch.zeros_like(written)
    expected[7] = True
    expected[2, :, :, :2] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_fp32(tmp_path: Path, dtype: str) -> None:
    folder = write_checkpoint(tmp_path)
    exact, rounded = load(folder), load(folder, dtype=dtype)
    assert rounded.spec.layout.dtype == dtype
    prompt = list(range(3, 30))
    found = []
    for runner in (exact, rounded):
        token = runner.execute([chunk(prompt, 0, 27, list(range(7)))]).tokens[0]
        assert token is not None
        assert token.logprobs is not None
        found.append(token.logprobs.logprob)
    assert found[0] == pytest.approx(found[1], abs=0.1)
    assert exact.spec.layout.model_fingerprint != rounded.spec.layout.model_fingerprint


def test_auto_dtype_and_shorter_length(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path, torch_dtype="bfloat16"), max_model_len=32)
    assert (runner.spec.layout.dtype, runner.spec.max_model_len) == ("bfloat16", 32)


def test_a_prompt_as_long_as_the_model_allows(runner: TorchRunner, tmp_path: Path) -> None:
    runner = load(tmp_path, num_blocks=32)
    tokens = [token % 64 for token in range(128)]
    assert runner.execute([chunk(tokens, 0, 128, list(range(32)))]).tokens[0] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_len": 129}, "max_model_len 129"),
        ({"max_model_len": 0}, "max_model_len 0"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"num_blocks": 1 << 40}, "GiB are free"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_met(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_checkpoint(tmp_path), **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        load(write_checkpoint(tmp_path), device="cuda")


def test_incomplete_checkpoints(tmp_path: Path) -> None:
    untied = write_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(untied)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(empty)
    unlike = write_checkpoint(tmp_path / "unlike")
    config = json.loads((unlike / "config.json").read_text()) | {"intermediate_size": 64}
    (unlike / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape"):
        load(unlike)


def test_close_may_be_called_again(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path))
    runner.close()
    runner.close()
    with pytest.raises(AssertionError, match="closed"):
        runner.execute([chunk([1], 0, 1, [0])])
