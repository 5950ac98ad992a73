"""Layers of the last chunk leave while the next ones are computed: a real model, real channels."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.types import Refusal, RefusalReason, SequenceSpec, WorkerId
from kvmesh.engine import runner
from kvmesh.engine.stage_progress import StepProgress
from kvmesh.kv.hashing import root_hash
from kvmesh.kv.stages import Stages
from kvmesh.policy.link import LinkView
from kvmesh.policy.transfer_mode import ModeDecision, TransferTask, choose_transfer_mode
from kvmesh.runtime import handover
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from kvmesh.transfer.frames import BlockPart, PutFrame
from kvmesh.transfer.target import AlreadyThere, WriteGrant
from tests.integration.families import GREEDY, NEW_TOKENS, Checkpoint
from tests.worker_driver import Driver, Key, driving, make_spec, running_worker, until_idle

CHUNK, BLOCK_TOKENS = 64, 16


FAMILIES = (
    "llama-untied-sharded",
    "deepseek-v3",
    "olmo2",
    "gemma3",
    "qwen3-next",
    "kimi-linear",
    "falcon-h1",
)
"""With one group of layers, with windows, and with states, also beside attention in a layer."""


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def engine(folder: Path) -> EngineSection:
    return EngineSection(
        model=str(folder),
        num_blocks=256,
        max_batch_tokens=CHUNK,
        block_size=BLOCK_TOKENS,
        dtype="float32",
    )


def spec_of(tokens: list[int]) -> SequenceSpec:
    sampling = replace(GREEDY, max_tokens=NEW_TOKENS)
    return SequenceSpec(tuple(tokens), len(tokens), sampling, root_hash("test"))


@dataclass
class Arrivals:
    """What a decode worker received, None for whole blocks; `came` is set with every part."""

    parts: list[BlockPart | None] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)

    def watch(self, worker: Worker) -> None:
        plain = worker.decode.arriving.end_write

        def end_write(grant: WriteGrant, ok: bool) -> None:
            plain(grant, ok)
            self.parts.append(grant.put.part)
            if grant.put.part is not None:
                self.came.set()

        worker.decode.arriving.end_write = end_write  # type: ignore[method-assign]


@pytest.fixture
async def decode(checkpoint: Checkpoint) -> AsyncIterator[Worker]:
    section = WorkerSection(id="d0", role="decode")
    async with running_worker(section, engine(checkpoint.folder)) as worker:
        yield worker


@pytest.mark.parametrize("channels", ["local", "shm", "tcp"])
async def test_layers_arrive_before_the_prompt_is_done_and_give_the_same_tokens(
    checkpoint: Checkpoint, decode: Worker, channels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = Arrivals()
    arrivals.watch(decode)

    class HeldBack(StepProgress):
        """Every layer waits until the ones before it have arrived."""

        def __init__(self, stages: Stages, tell: Callable[[int], None]) -> None:
            def tell_and_wait(num_stages: int) -> None:
                arrivals.came.clear()
                tell(num_stages)
                assert arrivals.came.wait(20), "the layers did not leave"

            super().__init__(stages, tell_and_wait)

    monkeypatch.setattr(runner, "StepProgress", HeldBack)
    section = WorkerSection(id="p1", role="prefill", channels=channels, transfer_mode="layered")
    async with running_worker(section, engine(checkpoint.folder)) as prefill:
        driver = Driver()
        await driver.connect(prefill)
        await driver.connect(decode)
        for number, (tokens, expected) in enumerate(
            zip(checkpoint.prompts, checkpoint.expected, strict=True)
        ):
            arrivals.parts.clear()
            key = Key(f"r{number}")
            assert await driver.generate(prefill, decode, key, spec_of(tokens)) == expected
            stages = prefill.core.spec.stages
            assert [part for part in arrivals.parts if part is not None] == [
                BlockPart(stage.offset, stage.size) for stage in stages
            ]
        await until_idle(prefill, decode)
        await driver.close()


async def test_a_slow_link_makes_the_last_chunk_leave_by_layers(
    checkpoint: Checkpoint, decode: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[TransferTask] = []
    link = LinkView(WorkerId("d0"), "tcp", goodput_bytes_s=1.0)

    def chosen(task: TransferTask, _measured: LinkView | None) -> ModeDecision:
        tasks.append(task)
        return choose_transfer_mode(task, link)

    monkeypatch.setattr(handover, "choose_transfer_mode", chosen)
    arrivals = Arrivals()
    arrivals.watch(decode)
    section = WorkerSection(id="p1", role="prefill")
    async with (
        running_worker(section, engine(checkpoint.folder)) as prefill,
        driving(prefill, decode) as driver,
    ):
        spec = prefill.core.spec
        tokens, expected = max(
            zip(checkpoint.prompts, checkpoint.expected, strict=True), key=lambda each: len(each[0])
        )
        assert await driver.generate(prefill, decode, Key("r"), spec_of(tokens)) == expected
        assert any(part is not None for part in arrivals.parts)
        await until_idle(prefill, decode)
    state_bytes = spec.groups.state_blocks * spec.layout.block_bytes
    (task,) = tasks
    kv_bytes, num_last = task.num_bytes - state_bytes, len(tokens) % CHUNK
    assert task.last_bytes == kv_bytes * num_last // len(tokens) + state_bytes


async def test_a_receiver_that_takes_blocks_whole_gets_them_whole(
    checkpoint: Checkpoint, decode: Worker
) -> None:
    arrivals = Arrivals()
    arrivals.watch(decode)
    plain = decode.decode.arriving.begin_write

    def whole_only(put: PutFrame) -> WriteGrant | AlreadyThere | Refusal:
        return plain(put) if put.part is None else Refusal(RefusalReason.INVALID, "whole blocks")

    decode.decode.arriving.begin_write = whole_only  # type: ignore[method-assign]
    section = WorkerSection(id="p1", role="prefill", transfer_mode="layered", channels="tcp")
    async with running_worker(section, engine(checkpoint.folder)) as prefill:
        driver = Driver()
        await driver.connect(prefill)
        await driver.connect(decode)
        tokens, expected = max(zip(checkpoint.prompts, checkpoint.expected, strict=True))
        assert await driver.generate(prefill, decode, Key("r"), spec_of(tokens)) == expected
        assert arrivals.parts
        assert set(arrivals.parts) == {None}
        await until_idle(prefill, decode)
        await driver.close()


async def test_a_first_token_that_is_the_last_leaves_no_layers_to_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = EngineSection(kind="fake", num_blocks=64, max_batch_tokens=32)
    section = WorkerSection(id="p1", role="prefill", transfer_mode="layered")
    async with (
        running_worker(section, small) as prefill,
        running_worker(WorkerSection(id="d1", role="decode"), small) as decode,
        driving(prefill, decode) as driver,
    ):
        channels, goes_on = prefill.prefill._channels, asyncio.Event()
        plain = channels.put

        async def put(*arguments: Any) -> None:
            await goes_on.wait()
            await plain(*arguments)

        monkeypatch.setattr(channels, "put", put)
        key, spec = Key("r"), make_spec(list(range(3, 83)), max_tokens=1)
        reserved = await driver.reserve(decode, key, spec)
        await driver.offer(prefill, key, spec, reserved.reserved)
        # The blocks of the first chunk are on their way when the last one ends the sequence.
        first = await driver.prefill_event(key)
        assert first.first_token.finish_reason
        goes_on.set()
        handed = await driver.prefill_event(key)
        assert handed.WhichOneof("event") == "handed_off", handed
        driver.cancel_decode(decode, key)
        await until_idle(prefill, decode)
