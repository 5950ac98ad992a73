"""Hybrids and experts on a device against transformers on the host, and blocks in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvmesh.core.types import KvLayout
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.kv_cache import allocate_pool
from kvmesh.engine.runner import TorchRunner
from tests.integration.families import BLOCK_SIZE, NUM_BLOCKS, WITH_A_LONG_ONE, Checkpoint
from tests.integration.test_transformers_equality import Homes, Stream, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


NAMES = [
    "qwen3-next",
    "qwen3.5",
    "kimi-linear",
    "bailing-hybrid",
    "minimax",
    "granite4",
    "deepseek-v3",
    "gpt-oss",
]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(name, tmp_path, WITH_A_LONG_ONE)
    runner = TorchRunner.load(
        tmp_path, served_name="tiny", device="cuda", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
    )
    homes = Homes(runner).homes(WITH_A_LONG_ONE)
    streams = [Stream(*pair) for pair in zip(checkpoint.prompts, homes, strict=True)]
    run(runner, streams, chunk=256)
    assert [stream.output for stream in streams] == checkpoint.expected
    runner.close()


def test_blocks_leave_a_device_and_come_back() -> None:
    layout = KvLayout("f", "float32", 4, 1, 1, 2)
    pool = allocate_pool(layout, 8, "cuda")
    content = torch.arange(pool.tensor.numel(), dtype=torch.float32).view(pool.tensor.shape)
    pool.tensor.copy_(content)
    arena = HostArena(pool, layout.block_bytes, 8)
    places = arena.take(3)
    arena.store([2, 3, 6], places)
    pool.tensor.zero_()
    arena.load(places, [0, 1, 7])
    assert torch.equal(pool.tensor[[0, 1, 7]].cpu(), content[[2, 3, 6]])
    pool.close()
