"""A worker that computes the beginning of a prompt for another one dies, or hangs, meanwhile."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kvmesh.core.types import Endpoint, PrefixSource, WorkerId
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.mesh_child import Child
from tests.mesh_processes import MODEL, MODEL_FOLDER, fake_tokens
from tests.waiting import until
from tests.worker_driver import (
    driving,
    make_spec,
    running_worker,
    until_idle,
)

PROMPT = list(range(3, 803))
NUM_BLOCKS = 30
ENGINE = EngineSection(kind="fake", model=str(MODEL_FOLDER), model_name=MODEL)


def upstream_worker(folder: Path) -> Child:
    """A worker whose steps take seconds."""
    flags: dict[str, object] = {
        "worker.id": "upstream",
        "worker.channels": "tcp",
        "worker.scheduler-targets": "",
        "worker.kvmanager-target": "",
        "engine.kind": "fake",
        "engine.model": MODEL_FOLDER,
        "engine.model-name": MODEL,
        "engine.fake-step-s": 3.0,
    }
    return Child("upstream", "prefill", flags, folder, is_forked=True)


def part_of(child: Child) -> PrefixSource:
    host, _, port = child.address.rpartition(":")
    ready = child.event("worker_ready")
    assert ready is not None
    control = Endpoint(host, int(port))
    return PrefixSource(
        WorkerId("upstream"), ready["incarnation"], control, NUM_BLOCKS, computes=True
    )


def parts(worker: Worker, outcome: str) -> float:
    return float(worker.chain_metrics.parts.labels(outcome)._value.get())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_last_worker_computes_the_prompt(tmp_path: Path, how: signal.Signals) -> None:
    child = upstream_worker(tmp_path)
    last = WorkerSection(id="last", role="prefill", lease_s=2.0)
    async with (
        running_worker(last, ENGINE) as worker,
        running_worker(WorkerSection(id="d0"), ENGINE) as decode,
        driving(worker, decode) as driver,
    ):
        child.start()
        await child.ready()
        try:
            spec = make_spec(PROMPT)
            asked = asyncio.create_task(driver.generate_from(part_of(child), worker, decode, spec))
            await until(lambda: parts(worker, "accepted"), "a part is accepted")
            child.signal(how)
            tokens, _ = await asked
            assert tokens == fake_tokens(PROMPT, spec.sampling.max_tokens)
            assert parts(worker, "lost") == 1
            assert worker.core.statistics().computed_tokens_total >= len(PROMPT)
            await until_idle(worker, decode)
        finally:
            child.kill()
