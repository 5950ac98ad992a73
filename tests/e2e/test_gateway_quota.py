"""One tenant's quota over replicas of a gateway and their processes, counted in a real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.cli.keys import main as keys
from tests.mesh_processes import MODEL, MODEL_FOLDER, Mesh, running_mesh
from tests.waiting import until

NUM_ALLOWED = 20
BODY = {"model": MODEL, "prompt": [20, 30, 40], "max_tokens": 2}
REPLICAS = ("gateway-a", "gateway-b")


def _add_replicas(mesh: Mesh, tenants_file: Path) -> None:
    assert mesh.redis is not None
    for name in REPLICAS:
        mesh.add(
            name,
            "gateway",
            {
                "http.port": 0,
                "http.processes": 2,
                "scheduler.targets": mesh["scheduler"].address,
                "model.path": MODEL_FOLDER,
                "model.served-name": MODEL,
                "access.tenants-file": tenants_file,
                "redis.url": mesh.redis.url,
                "redis.timeout-s": 10,
                # One comes back in a minute, later than this test ends.
                "quota.burst-s": 60 * NUM_ALLOWED,
            },
        )


def _num_serving(mesh: Mesh) -> int:
    return sum(event["event"] == "serving" for name in REPLICAS for event in mesh[name].events())


async def _ask(urls: Iterable[str], key: str) -> list[tuple[int, dict[str, Any]]]:
    """Sends one request to each address, all at once, a connection each."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one(url: str) -> tuple[int, dict[str, Any]]:
            async with session.post(f"{url}/v1/completions", json=BODY) as answer:
                await answer.read()
                return answer.status, dict(answer.headers)

        return await asyncio.gather(*map(one, urls))


async def test_four_processes_give_exactly_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tenants.json"
    flags = ("--tenant", "a", "--tenants-file", str(file), "--requests-per-min", "1")
    assert await asyncio.to_thread(keys, ["create", *flags]) == 0
    key = capsys.readouterr().out.split()[-1]
    async with running_mesh(tmp_path, 1, 1) as mesh:
        _add_replicas(mesh, file)
        await until(lambda: _num_serving(mesh) == 4, "two replicas of two processes serve", 40)
        urls = [f"http://{mesh[name].address_of('http_serving')}" for name in REPLICAS]

        async def ready() -> bool:
            async with aiohttp.ClientSession() as session:
                answers = [await session.get(f"{url}/ready") for url in urls * 4]
                return all(answer.status == 200 for answer in answers)

        await until(ready, "all know the workers")
        answers = await _ask(urls * NUM_ALLOWED, key)
        assert Counter(status for status, _ in answers) == {200: NUM_ALLOWED, 429: NUM_ALLOWED}
        quotas = {headers.get("x-kvmesh-quota") for status, headers in answers if status == 429}
        assert quotas == {"requests_per_min"}
        await mesh.idle()
