"""Workers whose pools only a device reaches: real model and channels, a twin of the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.types import KvLayout, PrefixSource
from kvmesh.engine.kv_cache import HostKvPool, KvPool
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import DataSection, EngineSection, WorkerSection
from kvmesh.transfer.frames import BlockPart
from kvmesh.transfer.target import WriteGrant
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


def parts_written(worker: Worker) -> list[BlockPart | None]:
    """What of their blocks the writes of a worker were of, in their order, as they end."""
    parts: list[BlockPart | None] = []
    plain = worker.decode.arriving.end_write

    def end_write(grant: WriteGrant, ok: bool) -> None:
        plain(grant, ok)
        parts.append(grant.put.part)

    worker.decode.arriving.end_write = end_write  # type: ignore[method-assign]
    return parts


@pytest.mark.parametrize(
    ("kinds", "channels", "mode"),
    [
        (("device", "host"), "tcp", "chunked"),
        (("device", "host"), "shm", "chunked"),
        (("host", "device"), "shm", "layered"),
        (("device", "host"), "shm", "layered"),
        (("device", "device"), "tcp", "layered"),
        (("device", "device"), "ipc", "layered"),
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


@pytest.mark.parametrize("kinds", [("device", "host")])
async def test_the_policy_sends_layers_over_a_link_that_it_has_seen_to_be_slow(
    checkpoint: Checkpoint, kinds: tuple[str, str]
) -> None:
    sender = WorkerSection(id="p0", role="prefill", channels="tcp")
    slow = DataSection(budget_mb_s=0.5)
    async with (
        running_worker(sender, engine(checkpoint.folder), data=slow) as prefill,
        running_worker(WorkerSection(id="d0"), engine(checkpoint.folder)) as decode,
        driving(prefill, decode) as driver,
    ):
        parts = parts_written(decode)
        for number, is_layered in ((4, False), (3, True)):
            spec = make_spec(checkpoint.prompts[number], max_tokens=NEW_TOKENS)
            answer = await driver.generate(prefill, decode, Key(f"r{number}"), spec)
            assert answer == checkpoint.expected[number]
            in_layers = [part for part in parts if part is not None]
            assert bool(in_layers) is is_layered, parts
        modes = prefill._metrics.transfer_modes
        assert [modes.labels(mode)._value.get() for mode in ("whole", "chunked", "layered")] == [
            0,
            1,
            1,
        ]
        layout = prefill.core.spec.layout
        assert sum(part.size for part in in_layers) == layout.block_bytes
        assert in_layers[0] == BlockPart(0, in_layers[0].size)
        await until_idle(prefill, decode)
        check_nothing_is_held(prefill)


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
