"""`kvmesh up` replaces a worker that is killed under load by one other, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmesh.cli.scheduler_access import LiveFleet
from kvmesh.cli.stack_state import read_description
from kvmesh.core.types import Role
from tests.chaos.load import under_load
from tests.e2e.api_client import ApiClient
from tests.e2e.local_stack import a_taken_port, fault_of, faulty, member, running_up, watched
from tests.mesh_child import scrape
from tests.waiting import until

LOST = "decode-0"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def decoders(view: LiveFleet) -> set[tuple[str, int]]:
    """Lives of those that decode."""
    infos = (each.info for each in view.workers)
    return {(info.worker_id, info.incarnation) for info in infos if info.role is Role.DECODE}


async def steps(told: dict[str, Any], *names: str) -> dict[str, float]:
    """How often places were to be filled in which way."""
    port = member(told, "scheduler")["metrics_port"]
    found = await scrape(f"http://127.0.0.1:{port}/metrics")
    return {step: found.value("kvmesh_scheduler_substitutes_total", step=step) for step in names}


def roles(view: LiveFleet) -> Counter[str]:
    return Counter(each.info.role.value for each in view.workers)


@pytest.mark.parametrize(
    ("engine", "num_spare"),
    [
        ("fake", 1),
        pytest.param("fake", 0, marks=pytest.mark.long),
        pytest.param("kvmesh", 1, marks=pytest.mark.long),
    ],
)
async def test_one_kill_under_load_takes_one_substitute(
    tmp_path: Path, engine: str, num_spare: int
) -> None:
    words = ("--engine", engine, "--spare", str(num_spare))
    async with (
        running_up(tmp_path, *words) as told,
        ApiClient(f"http://{told['http']}") as client,
        watched(told) as view,
    ):
        whole, before = roles(view), decoders(view)
        assert whole == Counter(prefill=2, decode=2, spare=num_spare)
        async with under_load(client) as load:
            await load.more(20)
            os.kill(member(told, LOST)["pid"], signal.SIGKILL)
            began = asyncio.get_running_loop().time()
            await until(lambda: len(decoders(view) - before) == 1, "its place is taken")
            full_s = asyncio.get_running_loop().time() - began
            await until(lambda: roles(view) == whole, "it is back")
            await load.more(20)
        print(f"full capacity after {full_s:.2f} s with {num_spare} spares")
        if engine == "fake":
            load.check_all_ok()
        assert all(answer.ok for _, _, answer in load.answers)
        names = {str(each.info.worker_id): each.info.role.value for each in view.workers}
        if num_spare:
            assert (names["spare-0"], names[LOST]) == ("decode", "spare")
            assert full_s < 1.0
        expected = {"spare": num_spare, "return": 1 - num_spare, "flip": 0, "process": 0}
        assert await steps(told, *expected) == expected


@pytest.mark.parametrize("engine", ["fake", pytest.param("kvmesh", marks=pytest.mark.long)])
async def test_an_empty_spare_loads_the_model_when_one_is_killed(
    tmp_path: Path, engine: str
) -> None:
    async with (
        running_up(tmp_path, "--engine", engine, "--empty-spare", "1") as told,
        ApiClient(f"http://{told['http']}") as client,
        watched(told) as view,
    ):
        await until(lambda: [each.is_waiting for each in view.empty_spares] == [True], "it waits")
        whole, before = roles(view), decoders(view)
        assert whole == Counter(prefill=2, decode=2), "it belongs to no group"
        async with under_load(client) as load:
            await load.more(20)
            os.kill(member(told, LOST)["pid"], signal.SIGKILL)
            began = asyncio.get_running_loop().time()
            await until(lambda: len(decoders(view) - before) == 1, "its place is taken", 60)
            print(f"full capacity after {asyncio.get_running_loop().time() - began:.2f} s")
            await until(lambda: roles(view) == whole + Counter(spare=1), "it is back", 60)
            await load.more(20)
        if engine == "fake":
            load.check_all_ok()
        assert all(answer.ok for _, _, answer in load.answers)
        names = {str(each.info.worker_id): each.info.role.value for each in view.workers}
        assert (names["empty-0"], names[LOST]) == ("decode", "spare")
        assert not view.empty_spares
        expected = {"empty": 1, "spare": 0, "return": 0, "flip": 0, "process": 0}
        assert await steps(told, *expected) == expected


@pytest.mark.long
async def test_a_worker_that_does_not_come_back_is_replaced_by_one_new_process(
    tmp_path: Path,
) -> None:
    async with (
        running_up(tmp_path, "--engine", "fake") as told,
        ApiClient(f"http://{told['http']}") as client,
        watched(told) as view,
    ):
        before = decoders(view)
        lost = member(told, LOST)
        async with under_load(client) as load:
            os.kill(lost["pid"], signal.SIGKILL)
            # Its next life finds it so.
            async with a_taken_port(int(lost["address"].rpartition(":")[2])):
                began = asyncio.get_running_loop().time()
                await until(lambda: decoders(view) - before, "another process has its place", 60)
                print(f"full capacity after {asyncio.get_running_loop().time() - began:.2f} s")
                await load.more(20)
            await until(lambda: stopped(tmp_path), "of both, one is stopped", 60)
            await load.more(20)
        load.check_all_ok()
        assert len(decoders(view)) == len(before)
        assert await steps(told, "process", "spare") == {"process": 1, "spare": 0}


@pytest.mark.long
async def test_the_last_decode_worker_hangs_and_is_started_again(tmp_path: Path) -> None:
    fault = fault_of(tmp_path, LOST)
    faulty(tmp_path, LOST)
    async with (
        running_up(tmp_path, "--engine", "fake", "--prefill", "1", "--decode", "1") as told,
        ApiClient(f"http://{told['http']}") as client,
        watched(told) as view,
    ):
        before = decoders(view)
        async with under_load(client) as load:
            await load.more(60)  # how long steps take is known
            fault.write_text("hang")
            await until(lambda: not psutil.pid_exists(member(told, LOST)["pid"]), "it is killed")
            fault.unlink()
            await until(lambda: decoders(view) - before, "it is back", 60)
            await load.more(20)
        load.check_all_ok()
        expected = {"return": 1, "ended": 1, "spare": 0, "process": 0}
        assert await steps(told, *expected) == expected


@pytest.mark.long
async def test_a_worker_that_hangs_is_killed_when_a_spare_has_its_place(tmp_path: Path) -> None:
    fault = fault_of(tmp_path, LOST)
    faulty(tmp_path, LOST)
    async with (
        running_up(tmp_path, "--engine", "fake", "--spare", "1") as told,
        ApiClient(f"http://{told['http']}") as client,
        watched(told) as view,
    ):
        whole = roles(view)
        async with under_load(client) as load:
            await load.more(60)  # how long steps take is known
            fault.write_text("hang")
            await until(lambda: not psutil.pid_exists(member(told, LOST)["pid"]), "it is killed")
            fault.unlink()
            await until(lambda: roles(view) == whole, "it is back", 60)
            await load.more(20)
        load.check_all_ok()
        names = {str(each.info.worker_id): each.info.role.value for each in view.workers}
        assert (names["spare-0"], names[LOST]) == ("decode", "spare")
        assert await steps(told, "spare", "ended", "process") == {
            "spare": 1,
            "ended": 1,
            "process": 0,
        }


def stopped(folder: Path) -> bool:
    told = read_description(folder / "state")
    assert told is not None
    names = [str(each["name"]) for each in told["members"]]
    return sum(name.startswith("decode") for name in names) == 2
