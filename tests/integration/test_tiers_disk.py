"""Prompts whose prefix lies on disk, also after a crash: the same tokens, and less is computed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvmesh.core.block_names import TELLS_TIERS, in_disk
from kvmesh.engine.block_file import BlockFile
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, TiersSection, WorkerSection
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.integration.test_tiers import ENGINE, SPECS, fill
from tests.waiting import until
from tests.worker_driver import (
    Driver,
    Key,
    driving,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)

W = WorkerSection(id="w")
LONGEST_STALL_S = 30
BLOCK_BYTES = 128


def on_disk(folder: Path, host_gib: float = 0.0) -> TiersSection:
    return TiersSection(host_gib=host_gib, disk_gib=0.001, disk_path=str(folder))


async def ask_again(driver: Driver, worker: Worker) -> int:
    """All prompts once more; returns how many tokens were computed."""
    before = worker.core.token_totals[0]
    for number, spec in enumerate(SPECS):
        tokens = await driver.generate(worker, worker, Key(f"again-{number}"), spec)
        assert tokens == reference_tokens(spec)
        await until_idle(worker)
    return worker.core.token_totals[0] - before


# Host memory for 100 blocks: most of what it had goes on to the disk.
@pytest.mark.parametrize("host_gib", [0.0, 100 * BLOCK_BYTES / (1 << 30)])
async def test_what_was_evicted_comes_back_from_disk(tmp_path: Path, host_gib: float) -> None:
    tiers = on_disk(tmp_path, host_gib)
    async with running_worker(W, ENGINE, tiers=tiers) as worker, driving(worker) as driver:
        await fill(driver, worker)
        assert await ask_again(driver, worker) < 100
        assert worker.tiers is not None
        worker.tiers.check_integrity()
        *_, disk = worker.tiers.statistics()
        assert disk.name == "disk"
        assert disk.loaded_total > 50
        assert disk.lost_total == 0


async def test_a_worker_that_crashed_finds_and_tells_what_it_had(tmp_path: Path) -> None:
    async with (
        running_worker(W, ENGINE, tiers=on_disk(tmp_path / "a")) as worker,
        driving(worker) as driver,
    ):
        await fill(driver, worker)
        # What the file is at this moment is what a killed process would leave.
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert worker.tiers is not None
        kept = worker.tiers.statistics()[0].num_kept
    async with (
        running_worker(W, ENGINE, tiers=on_disk(tmp_path / "b")) as worker,
        driving(worker) as driver,
    ):
        pool = worker.core.pool
        held = pool.held_hashes()
        assert len(held) == kept > 100
        assert set(pool.take_events().stored) == {TELLS_TIERS, *held, *map(in_disk, held)}
        assert await ask_again(driver, worker) < 300
    other = EngineSection(kind="fake", num_blocks=48, fake_token_bytes=16)
    async with running_worker(W, other, tiers=on_disk(tmp_path / "b")) as worker:
        assert worker.core.pool.held_hashes() == []


async def test_a_disk_that_corrupts_costs_computation_and_nothing_else(tmp_path: Path) -> None:
    tiers = on_disk(tmp_path)
    async with running_worker(W, ENGINE, tiers=tiers) as worker, driving(worker) as driver:
        await fill(driver, worker)
        path = tmp_path / "w.kv"
        size, behind_records = path.stat().st_size, 4096 * 130
        with path.open("r+b") as file:
            for at in range(behind_records, size, BLOCK_BYTES):
                file.seek(at)
                file.write(os.urandom(16))
        assert await ask_again(driver, worker) > 1000
        assert worker.tiers is not None
        worker.tiers.check_integrity()
        assert worker.tiers.statistics()[0].lost_total > 0


async def test_a_disk_that_stalls_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    read = BlockFile.read

    def stalled(self: BlockFile, places: Sequence[int], blocks: Sequence[memoryview]) -> list[bool]:
        go_on.wait(LONGEST_STALL_S)
        return read(self, places, blocks)

    monkeypatch.setattr("kvmesh.engine.disk_store.STALL_S", 0.2)
    tiers = on_disk(tmp_path)
    async with running_worker(W, ENGINE, tiers=tiers) as worker, driving(worker) as driver:
        await fill(driver, worker)
        monkeypatch.setattr(BlockFile, "read", stalled)
        spec = SPECS[0]
        tokens = await driver.generate(worker, worker, Key("stalled"), spec)
        assert tokens == reference_tokens(spec)
        assert not go_on.is_set()
        assert worker.tiers is not None
        assert worker.tiers.statistics()[0].lost_total > 0
        go_on.set()
        await until(lambda: worker.is_idle)
        monkeypatch.setattr(BlockFile, "read", read)
        tokens = await driver.generate(worker, worker, Key("after"), SPECS[1])
        assert tokens == reference_tokens(SPECS[1])
        await until_idle(worker)


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3", "qwen3-next"])
async def test_checkpoints_go_on_after_a_restart(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model")
    engine = EngineSection(
        model=str(checkpoint.folder), num_blocks=64, max_batch_tokens=48, state_interval_tokens=64
    )
    tiers = TiersSection(disk_gib=0.1, disk_path=str(tmp_path / "disk"))
    prompt = checkpoint.prompts[4]
    prompts = [[(token + shift) % 320 for token in prompt] for shift in range(5)]
    computed = []
    for _ in range(2):
        async with running_worker(W, engine, tiers=tiers) as worker, driving(worker) as driver:
            for number, tokens in enumerate(prompts):
                spec = make_spec(tokens, max_tokens=NEW_TOKENS)
                got = await driver.generate(worker, worker, Key(f"p-{number}"), spec)
                assert got == checkpoint.continue_greedily(tokens)
                await until_idle(worker)
            computed.append(worker.core.token_totals[0])
    assert computed[1] < computed[0] / 2
