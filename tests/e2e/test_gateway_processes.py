"""A gateway of several processes: one port, one set of metrics, and one may die."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.mesh_child import scrape, until
from tests.mesh_processes import MODEL, Mesh, running_mesh

BODY = {"model": MODEL, "prompt": [20, 30, 40], "max_tokens": 4, "temperature": 0}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(tmp_path, 1, 1, flags={"gateway": {"http.processes": 2}}) as mesh:
        await until(lambda: len(_started(mesh)) == 2, "two processes started")
        await until(lambda: len(_serving(mesh)) == 2, "two processes serve")
        yield mesh


def _started(mesh: Mesh) -> list[int]:
    events = mesh["gateway"].events()
    return [event["pid"] for event in events if event["event"] == "gateway_process_started"]


def _serving(mesh: Mesh) -> list[dict[str, Any]]:
    return [event for event in mesh["gateway"].events() if event["event"] == "serving"]


async def _ask(session: aiohttp.ClientSession, mesh: Mesh) -> list[int]:
    async with session.post(
        f"{mesh.url}/v1/completions", json={**BODY, "return_token_ids": True}
    ) as response:
        assert response.status == 200, await response.text()
        token_ids: list[int] = (await response.json())["choices"][0]["token_ids"]
        return token_ids


async def _num_served(mesh: Mesh) -> float:
    return (await scrape(f"{mesh.url}/metrics")).value("vllm:request_success_total")


async def test_both_serve_and_any_tells_the_metrics_of_both(mesh: Mesh) -> None:
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
            assert await _num_served(mesh) == 24
    assert (await mesh["gateway"].metrics()).value("vllm:request_success_total") == 24
    await mesh.idle()


async def test_one_that_dies_is_replaced_and_nothing_is_forgotten(mesh: Mesh) -> None:
    async with aiohttp.ClientSession() as session:
        await _ask(session, mesh)
    first, second = _started(mesh)
    psutil.Process(first).kill()
    await until(lambda: len(_serving(mesh)) == 3, "its successor serves")
    assert set(_started(mesh)[:2]) == {first, second}
    for _ in range(8):
        async with aiohttp.ClientSession() as session:
            await _ask(session, mesh)
    assert await _num_served(mesh) == 9
    await mesh.idle()


async def test_a_signal_drains_all(mesh: Mesh) -> None:
    mesh["gateway"].signal(signal.SIGTERM)
    assert await mesh["gateway"].exit_code() == 0
    assert not any(psutil.pid_exists(pid) for pid in _started(mesh))
