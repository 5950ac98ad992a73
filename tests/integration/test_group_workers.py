"""Checkpoints with KV groups through two workers: real streams, real data channel, real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.types import BlockHash
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.worker_driver import Driver, Key, make_spec, running_worker, until_idle


@pytest.mark.parametrize(
    ("family", "channels"),
    [
        ("gemma3", "local"),
        ("gemma3", "tcp"),
        ("deepseek-v3", "local"),
        ("deepseek-v3", "tcp"),
        ("qwen3-next", "local"),
        ("qwen3-next", "tcp"),
        ("kimi-linear", "tcp"),
        ("minimax", "tcp"),
        ("exaone4", "tcp"),
        ("lfm2", "tcp"),
        ("granite4-hybrid", "tcp"),
        ("ministral3", "tcp"),
    ],
)
async def test_tokens_over_the_handoff_equal_those_of_transformers(
    family: str, channels: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model")
    engine = EngineSection(
        model=str(checkpoint.folder), num_blocks=400, max_batch_tokens=48, state_interval_tokens=64
    )
    sender = WorkerSection(id="p0", role="prefill", channels=channels, transfer_mode="chunked")
    receiver = WorkerSection(id="d0", role="decode", channels=channels)
    async with (
        running_worker(sender, engine) as prefill,
        running_worker(receiver, engine) as decode,
    ):
        driver = Driver()
        await driver.connect(prefill)
        await driver.connect(decode)
        prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
        spec = make_spec(prompt, max_tokens=NEW_TOKENS)
        assert await driver.generate(prefill, decode, Key("cold"), spec) == expected
        await until_idle(prefill, decode)
        # Now both have some of it; the receiver's generated states are further than the sender's.
        assert await driver.generate(prefill, decode, Key("warm"), spec) == expected
        turn = make_spec(prompt + expected + checkpoint.prompts[3], max_tokens=NEW_TOKENS)
        answer = checkpoint.continue_greedily(list(turn.token_ids))
        assert await driver.generate(prefill, decode, Key("turn"), turn) == answer
        # Computed right in the reserved blocks, window by window.
        assert await driver.generate(decode, decode, Key("here"), turn) == answer
        await until_idle(prefill, decode)
        hashes = decode.core.pool.take_events().stored
        assert {len(each) for each in hashes} == {len(BlockHash(bytes(16)))}
        await driver.close()
