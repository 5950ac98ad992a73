"""Workers whose pools only a device reaches: real model and channels, a twin of the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.types import KvLayout, PrefixSource
from kvmesh.engine.kv_cache import HostKvPool, KvPool
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.device_twin import TwinPool
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.worker_driver import Key, driving, make_spec, running_worker, until_idle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("llama-untied-sharded", tmp_path_factory.mktemp("checkpoint"))


def engine(folder: Path) -> EngineSection:
    return EngineSection(model=str(folder), num_blocks=200, max_batch_tokens=64, dtype="float32")


@pytest.fixture(autouse=True)
def _pools_by_turn(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Gives the first worker a pool of the first kind, the second one of the second."""
    kinds = list(request.node.callspec.params["kinds"])

    def allocate(layout: KvLayout, num_blocks: int, _device: str) -> KvPool:
        pool = TwinPool if kinds.pop(0) == "device" else HostKvPool
        return pool(layout, num_blocks)

    monkeypatch.setattr("kvmesh.engine.runner.allocate_pool", allocate)


def check_nothing_is_held(worker: Worker) -> None:
    """All staging memory is free, and every step told the pool what it wrote."""
    pool = worker._runner.kv
    if isinstance(pool, TwinPool):
        staging = worker.channels._staging
        assert staging is not None
        assert staging.num_free == staging.num_blocks
        assert pool.driver.num_marks > 1
        # Copies wait for the device in threads of their own; at the start memory is made each way.
        names = pool.driver.threads
        assert names.count("MainThread") == 2
        assert any(name.startswith("kv-") for name in names)
    else:
        assert worker.channels._staging is None


@pytest.mark.parametrize(
    ("kinds", "channels", "mode"),
    [
        (("device", "host"), "tcp", "chunked"),
        (("device", "host"), "shm", "chunked"),
        (("host", "device"), "shm", "layered"),
        (("host", "device"), "tcp", "layered"),
        (("device", "device"), "local", "auto"),
        (("device", "device"), "ipc", "chunked"),
    ],
)
async def test_tokens_over_the_handoff_equal_those_of_transformers(
    checkpoint: Checkpoint, kinds: tuple[str, str], channels: str, mode: str
) -> None:
    sender = WorkerSection(id="p0", role="prefill", channels=channels, transfer_mode=mode)
    receiver = WorkerSection(id="d0", role="decode", channels=channels)
    async with (
        running_worker(sender, engine(checkpoint.folder)) as prefill,
        running_worker(receiver, engine(checkpoint.folder)) as decode,
        driving(prefill, decode) as driver,
    ):
        prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
        spec = make_spec(prompt, max_tokens=NEW_TOKENS)
        assert await driver.generate(prefill, decode, Key("cold"), spec) == expected
        turn = make_spec(prompt + expected + checkpoint.prompts[3], max_tokens=NEW_TOKENS)
        answer = checkpoint.continue_greedily(list(turn.token_ids))
        assert await driver.generate(prefill, decode, Key("turn"), turn) == answer
        await until_idle(prefill, decode)
        assert {key.channel for key in prefill.channels.statistics().links} == {channels}
        for worker in (prefill, decode):
            check_nothing_is_held(worker)


@pytest.mark.parametrize(
    ("kinds", "channels"),
    [(("device", "device"), "local"), (("device", "host"), "tcp"), (("host", "device"), "shm")],
)
async def test_a_prefix_is_fetched_from_a_device_or_to_one(
    checkpoint: Checkpoint, kinds: tuple[str, str], channels: str
) -> None:
    prompt, expected = checkpoint.prompts[4], checkpoint.expected[4]
    spec = make_spec(prompt, max_tokens=NEW_TOKENS)
    async with (
        running_worker(WorkerSection(id="h0"), engine(checkpoint.folder)) as holder,
        running_worker(
            WorkerSection(id="r0", channels=channels), engine(checkpoint.folder)
        ) as reader,
        driving(holder, reader) as driver,
    ):
        await driver.generate(holder, holder, Key("prime"), spec)
        info = holder._info
        source = PrefixSource(info.worker_id, info.incarnation, info.control_endpoint, 100)
        tokens, cached = await driver.generate_from(source, reader, reader, spec)
        assert tokens == expected
        assert cached == len(prompt) // 16 * 16
        assert holder.pool.statistics().opened_total == 1
        await until_idle(holder, reader)
        for worker in (holder, reader):
            check_nothing_is_held(worker)
