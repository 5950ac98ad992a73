"""A gateway of several processes: one port, one set of metrics, one console, and one may die."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from kvmesh.cli.__main__ import main
from tests.mesh_child import scrape
from tests.mesh_processes import MODEL, Mesh, running_mesh
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "token-of-the-operators"
BODY = {"model": MODEL, "prompt": [20, 30, 40], "max_tokens": 4, "temperature": 0}


@contextlib.asynccontextmanager
async def _two_processes(folder: Path) -> AsyncIterator[Mesh]:
    (folder / "token").write_text(TOKEN)
    flags = {
        "http.processes": 2,
        "server.admin.port": 0,
        "server.admin.token-file": folder / "token",
    }
    async with running_mesh(folder, 1, 1, flags={"gateway": flags}) as mesh:
        await until(lambda: len(_serving(mesh)) == 2, "two processes serve", 40)
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with _two_processes(tmp_path_factory.mktemp("mesh")) as mesh:
        yield mesh


def _started(mesh: Mesh) -> list[int]:
    events = mesh["gateway"].events()
    return [event["pid"] for event in events if event["event"] == "gateway_process_started"]


def _serving(mesh: Mesh) -> list[dict[str, Any]]:
    return [event for event in mesh["gateway"].events() if event["event"] == "serving"]


async def _ask(session: aiohttp.ClientSession, mesh: Mesh, name: str = "") -> list[int]:
    async with session.post(
        f"{mesh.url}/v1/completions",
        json={**BODY, "return_token_ids": True},
        headers={"x-request-id": name} if name else {},
    ) as response:
        assert response.status == 200, await response.text()
        token_ids: list[int] = (await response.json())["choices"][0]["token_ids"]
        return token_ids


@contextlib.asynccontextmanager
async def _admin(mesh: Mesh) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"http://{mesh['gateway'].address_of('admin_serving')}"
    async with aiohttp.ClientSession(url, headers=headers, raise_for_status=True) as session:
        yield session


async def _json(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as response:
        return await response.json()


async def _num_served(mesh: Mesh) -> float:
    return (await scrape(f"{mesh.url}/metrics")).value("vllm:request_success_total")


async def test_both_serve_and_any_tells_the_metrics_of_both(mesh: Mesh) -> None:
    before = await _num_served(mesh)
    port = int(mesh.url.rpartition(":")[2])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        answers = await asyncio.gather(*(_ask(session, mesh) for _ in range(24)))
        assert len({tuple(answer) for answer in answers}) == 1
        held = [
            sum(
                each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port
                for each in psutil.Process(pid).net_connections()
            )
            for pid in _started(mesh)
        ]
        assert min(held) > 0, held
        for _ in range(4):  # each on a connection of its own
            assert await _num_served(mesh) - before == 24
    metrics = await mesh["gateway"].metrics()
    assert metrics.value("vllm:request_success_total") - before == 24
    await mesh.idle()


async def test_the_admin_port_shows_all_and_finds_a_request_wherever_it_was(mesh: Mesh) -> None:
    names = [f"mine-{number}" for number in range(16)]
    async with _admin(mesh) as admin:
        before = (await _json(admin, "/console/snapshot"))["arrived_total"]
        # A connection each, so that both processes get some.
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True)
        ) as session:
            await asyncio.gather(*(_ask(session, mesh, name) for name in names))
        shown = await _json(admin, "/console/snapshot")
        assert (shown["arrived_total"] - before, shown["open"]) == (16, 0)
        assert shown["ended_total"] == shown["arrived_total"]
        rows = [row for row in shown["requests"] if row["id"].startswith("mine-")]
        assert [row["output_tokens"] for row in rows] == [4] * 16
        assert {row["id"] for row in shown["workers"]} == {"prefill-0", "decode-0"}
        for name in names:
            found = await _json(admin, f"/console/requests/{name}")
            assert found["id"].startswith(f"{name}-")
            assert found["phases"][-1]["phase"] == "decode"
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await _json(admin, "/console/requests/yours")
    await mesh.idle()


async def test_operators_reach_all_processes(mesh: Mesh) -> None:
    async with _admin(mesh) as admin:
        tasks = await _json(admin, "/debug/tasks")
        assert {task["process"] for task in tasks} == {0, 1}
        async with admin.get("/metrics") as response:
            assert "kvmesh_gateway_requests_open" in await response.text()
        async with admin.post("/admin/log-level", json={"level": "info"}) as response:
            assert (await response.json())["level"] == "info"
    levels = [event for event in mesh["gateway"].events() if event["event"] == "log_level_set"]
    assert len(levels) == 3  # the process that was asked, and both that it asked


async def test_top_shows_all(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    before = await _num_served(mesh)
    flags = ("--scheduler", mesh["scheduler"].address, "--url", mesh.url, "--once", "--json")
    secret = ("--secret-file", str(mesh.secret_file))
    top = asyncio.create_task(asyncio.to_thread(main, ["top", *flags, *secret]))
    async with aiohttp.ClientSession() as session:
        while not top.done():
            await asyncio.gather(*(_ask(session, mesh) for _ in range(4)))
    assert await top == 0
    gateway = json.loads(capsys.readouterr().out)["gateway"]
    assert 0 < gateway["finished_s"] <= await _num_served(mesh) - before
    await mesh.idle()


async def test_one_that_dies_is_replaced_and_nothing_is_forgotten(mesh: Mesh) -> None:
    num_serving = len(_serving(mesh))
    async with _admin(mesh) as admin:

        async def settled() -> bool:
            shown = await _json(admin, "/console/snapshot")
            return bool(shown["arrived_total"] == await _num_served(mesh))

        await until(settled, "the console has seen all")
        served = await _num_served(mesh)
        psutil.Process(_started(mesh)[0]).kill()
        await until(lambda: len(_serving(mesh)) > num_serving, "its successor serves")
        for _ in range(8):
            async with aiohttp.ClientSession() as session:
                await _ask(session, mesh)
        assert await _num_served(mesh) == served + 8
        assert (await _json(admin, "/console/snapshot"))["arrived_total"] == served + 8
    await mesh.idle()


async def test_one_that_hangs_is_replaced(mesh: Mesh) -> None:
    num_serving = len(_serving(mesh))
    psutil.Process(_started(mesh)[-1]).suspend()
    await until(lambda: len(_serving(mesh)) > num_serving, "its successor serves")
    events = mesh["gateway"].events()
    assert [event for event in events if event["event"] == "gateway_process_hung"]
    for _ in range(8):
        async with aiohttp.ClientSession() as session:
            await _ask(session, mesh)
    await mesh.idle()


async def test_the_death_of_their_parent_is_theirs(tmp_path: Path) -> None:
    async with _two_processes(tmp_path) as mesh:
        pids = _started(mesh)
        psutil.Process(pids[0]).suspend()  # also where one cannot do anything any more
        mesh["gateway"].kill()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "nobody is left")


async def test_a_drain_is_of_all(tmp_path: Path) -> None:
    async with _two_processes(tmp_path) as mesh, _admin(mesh) as admin:
        async with admin.post("/admin/drain") as response:
            assert response.status == 202
        assert await mesh["gateway"].exit_code() == 0
        assert not any(psutil.pid_exists(pid) for pid in _started(mesh))
