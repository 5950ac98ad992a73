"""Captured decode steps on a device: the tokens of plain steps, no wait within, no row behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.step_graphs import CaptureBounds
from tests.unit.engine.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(seed=6, temperature=0.7, top_p=0.9, num_logprobs=3),
]


def load(folder: Path) -> TorchRunner:
    return TorchRunner.load(folder, served_name="tiny", device="cuda", num_blocks=48, block_size=8)


def generate(runner: TorchRunner, num_tokens: int) -> list[list[int]]:
    """Streams of several lengths: the first step is their prompts, the others decode."""
    streams = [[(7 * i + k) % 64 for k in range(5 + 20 * i)] for i in range(3)]
    prompts, starts = [len(stream) for stream in streams], [0, 0, 0]
    for _ in range(num_tokens):
        chunks = [
            SequenceChunk(
                i,
                stream,
                starts[i],
                len(stream),
                list(range(16 * i, 16 * i + 16)),
                prompts[i],
                PARAMS[i],
                sample=True,
            )
            for i, stream in enumerate(streams)
        ]
        for i, token in enumerate(runner.execute(chunks).tokens):
            assert token is not None
            starts[i] = len(streams[i])
            streams[i].append(token.token_id)
    return streams


def test_graphs_give_the_tokens_of_plain_steps(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path))
    plain = generate(runner, 12)
    runner.use_static_steps(4)
    step = runner._static
    assert step is not None
    assert step.buckets == (1, 2, 4)
    # Three rows in a graph of four.
    assert generate(runner, 12) == plain


def test_spare_rows_touch_no_block(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path))
    runner.use_static_steps(4)
    runner.kv.tensor.fill_(3.0)
    chunk = SequenceChunk(1, [1, 2, 3], 2, 3, [5], 3, PARAMS[0], sample=True)
    runner.execute(
        [
            chunk,
            replace(chunk, sequence_id=2, block_table=[7]),
            replace(chunk, sequence_id=3, block_table=[9]),
        ]
    )
    changed = (runner.kv.tensor != 3.0).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == [5, 7, 9]


def test_a_replay_waits_for_nothing(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path))
    runner.use_static_steps(2)
    step = runner._static
    assert step is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            step.compute(2)
            step._inputs.send(2)
            step._run(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_without_time_the_largest_is_there(tmp_path: Path) -> None:
    runner = load(write_checkpoint(tmp_path))
    runner.use_static_steps(8, CaptureBounds(seconds=0.0))
    step = runner._static
    assert step is not None
    assert step.buckets[-1] == 8
    assert len(step.buckets) < 4
