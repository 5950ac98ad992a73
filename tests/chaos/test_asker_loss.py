"""A process that dies while another one computes for it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmesh.core.types import Refusal, WorkerId
from kvmesh.runtime.query_answers import QueryAnswers
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from kvmesh.transfer.query_ops import QueryGrant
from tests.mesh_child import Child
from tests.unit.engine.tiny_checkpoint import write_checkpoint
from tests.worker_driver import Key, driving, make_spec, running_worker, until_idle

DRAW = random.Random(3)
FIRST = [DRAW.randrange(3, 64) for _ in range(30)]


@dataclass(frozen=True)
class Named:
    """A worker as a driver knows it."""

    worker_id: WorkerId


async def test_an_asker_that_is_killed_gives_the_holder_its_blocks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    engine = EngineSection(model=str(folder), num_blocks=64, block_size=4)
    flags: dict[str, object] = {
        "worker.id": "asker",
        "worker.channels": "tcp",
        "worker.scheduler-targets": "",
        "worker.kvmanager-target": "",
        "engine.model": folder,
        "engine.num-blocks": 64,
        "engine.block-size": 4,
        "fetch.query": "always",
    }
    asker = Child("asker", "prefill", flags, tmp_path, is_forked=True)
    asker.start()
    computing, is_gone = threading.Event(), threading.Event()
    plain = QueryAnswers.compute

    def compute(
        answers: QueryAnswers, grant: QueryGrant, operands: memoryview
    ) -> Sequence[memoryview] | Refusal:
        computing.set()
        is_gone.wait(20)
        return plain(answers, grant, operands)

    monkeypatch.setattr(QueryAnswers, "compute", compute)
    section = WorkerSection(id="holder", role="decode", channels="tcp")
    try:
        async with running_worker(section, engine) as holder, driving(holder) as driver:
            await asker.ready()
            await driver.generate(holder, holder, Key("first"), make_spec(FIRST, max_tokens=4))
            await until_idle(holder)
            await driver.connect_to(WorkerId("asker"), asker.address)
            second = make_spec([*FIRST, *range(3, 12)], max_tokens=4)
            reserved = await driver.reserve(holder, Key("second"), second)
            await driver.offer(Named(WorkerId("asker")), Key("second"), second, reserved.reserved)
            assert await asyncio.to_thread(computing.wait, 20)
            asker.kill()
            driver.cancel_decode(holder, Key("second"))
            while holder.decode.num_tasks:
                await asyncio.sleep(0)
            assert holder.answers is not None
            assert holder.answers.num_open == 1
            assert not holder.core.pool.is_idle, "blocks stay while somebody computes on them"
            is_gone.set()
            await until_idle(holder)
            assert holder.answers.num_open == 0
    finally:
        is_gone.set()
        if asker.running:
            asker.kill()
