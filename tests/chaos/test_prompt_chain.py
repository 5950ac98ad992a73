"""A worker that computes the beginning of a prompt for another one dies, or hangs, meanwhile."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.mesh_processes import MODEL, MODEL_FOLDER, fake_tokens
from tests.peer_process import Peer
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


def parts(worker: Worker, outcome: str) -> float:
    return float(worker.chain_metrics.parts.labels(outcome)._value.get())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_last_worker_computes_the_prompt(
    tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy this machine is, the offer is taken.
    monkeypatch.setattr("kvmesh.runtime.prompt_chain.ANSWER_S", 10.0)
    # Its steps take seconds.
    upstream = Peer.make("upstream", tmp_path, fake_step_s=3.0)
    last = WorkerSection(id="last", role="prefill", lease_s=2.0)
    async with (
        running_worker(last, ENGINE) as worker,
        running_worker(WorkerSection(id="d0"), ENGINE) as decode,
        driving(worker, decode) as driver,
    ):
        child = upstream.child
        child.start()
        await child.ready()
        try:
            spec = make_spec(PROMPT)
            part = upstream.source(NUM_BLOCKS, computes=True)
            asked = asyncio.create_task(driver.generate_from(part, worker, decode, spec))
            await until(lambda: parts(worker, "accepted"), "a part is accepted")
            child.signal(how)
            tokens, _ = await asked
            assert tokens == fake_tokens(PROMPT, spec.sampling.max_tokens)
            assert parts(worker, "lost") == 1
            assert worker.core.statistics().computed_tokens_total >= len(PROMPT)
            await until_idle(worker, decode)
        finally:
            child.kill()
