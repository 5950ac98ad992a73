"""The runner on a device against the same runner on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvmesh.core.types import SamplingParams
from kvmesh.engine.noise import key_halves, uniform_of
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.runner import TorchRunner
from tests.unit.engine.tiny_checkpoint import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def generate(runner: TorchRunner, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """Six tokens for each prompt, all stepped together; the third stream is seeded."""
    streams = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    params = [SamplingParams(temperature=0.0)] * 2 + [SamplingParams(seed=5, top_p=0.9)]
    while True:
        active = [i for i, s in enumerate(streams) if len(s) < len(prompts[i]) + 6]
        if not active:
            return streams
        chunks = []
        for i in active:
            end = min(computed[i] + chunk, len(streams[i]))
            table = list(range(16 * i, 16 * i + 16))
            whole = end == len(streams[i])
            chunks.append(
                SequenceChunk(
                    i, streams[i], computed[i], end, table, len(prompts[i]), params[i], whole
                )
            )
        result = runner.execute(chunks)
        for i, done, token in zip(active, chunks, result.tokens, strict=True):
            computed[i] = done.end
            if token is not None:
                streams[i].append(token.token_id)


def test_tokens_equal_the_hosts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    prompts = [[7], [t % 64 for t in range(50)], [(3 * t) % 64 for t in range(33)]]
    found = []
    for device in ("cpu", "cuda"):
        runner = TorchRunner.load(
            folder, served_name="tiny", device=device, num_blocks=48, block_size=8
        )
        found.append(generate(runner, prompts, chunk=20))
        runner.close()
    assert found[0] == found[1]


def test_blocks_travel_between_pools(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    host, device = (
        TorchRunner.load(folder, served_name="tiny", device=name, num_blocks=6, block_size=8)
        for name in ("cpu", "cuda")
    )
    host.kv.tensor.normal_()
    device.kv.write_view(2, 3)[:] = host.kv.read_view(1, 3)
    assert not device.kv.tensor.any(), "nothing lands before `written`"
    device.kv.written(2, 3)
    assert torch.equal(device.kv.tensor[2:5].cpu(), host.kv.tensor[1:4])
    assert bytes(device.kv.read_view(2, 3)) == bytes(host.kv.read_view(1, 3))


def test_noise_is_the_same_on_every_device() -> None:
    keys = [1, 2**63 + 5, 12345678901234567]
    low, high = torch.tensor([key_halves(key) for key in keys], dtype=torch.int32).T
    on_host = uniform_of(low, high, 50_000)
    on_device = uniform_of(low.cuda(), high.cuda(), 50_000)
    assert torch.equal(on_host, on_device.cpu())
