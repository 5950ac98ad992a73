"""LoRA adapters are loaded, loaded again and removed while a mesh serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from kvmesh.cli.__main__ import main
from kvmesh.engine.adapters import CONFIG, WEIGHTS
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import MODEL, Flags, Mesh, fake_tokens, running_mesh
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = list(range(10, 60))
TOKENS = 8
LONG = 300


def write(folder: Path, weights: bytes, rank: int = 8) -> Path:
    """What the fake engine reads of an adapter: its rank and its bytes."""
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / WEIGHTS).write_bytes(weights)
    return folder


async def adapter(mesh: Mesh, *arguments: object) -> int:
    """Runs the command as a user does; it has an event loop of its own."""
    scheduler = ("--scheduler", mesh["scheduler"].address, "--secret-file", str(mesh.secret_file))
    return await asyncio.to_thread(main, ["adapter", *map(str, arguments), *scheduler])


async def listed(mesh: Mesh, *expected: str) -> None:
    """Waits until clients may name exactly these adapters; gateways hear of them a little later."""

    async def are() -> bool:
        async with session.get("/v1/models") as response:
            return [each["id"] for each in (await response.json())["data"]] == [MODEL, *expected]

    async with aiohttp.ClientSession(mesh.url, raise_for_status=True) as session:
        await until(are, f"/v1/models lists {expected}")


async def tokens(client: ApiClient, model: str) -> tuple[list[int], int]:
    answer = await client.complete(PROMPT, max_tokens=TOKENS, model=model)
    return answer.token_ids, answer.cached_tokens


async def test_adapters_come_change_and_go_while_the_mesh_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Flags = {"engine.max-loras": 2, "engine.fake-step-s": 0.005}
    gateway: Flags = {"http.adapter-changes": True}
    flags = {"prefill": engine, "decode": engine, "gateway": gateway}
    sql = write(tmp_path / "sql", b"one")
    async with (
        running_mesh(tmp_path, 1, 1, flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        plain = fake_tokens(PROMPT, TOKENS)
        assert await tokens(client, MODEL) == (plain, 0)
        assert (await client.complete(PROMPT, max_tokens=TOKENS, model="sql")).status == 404
        assert await adapter(mesh, "load", f"sql={sql}") == 0
        assert "sql: loaded on 2 of 2 workers of pydoc" in capsys.readouterr().out
        await listed(mesh, "sql")
        first, cached = await tokens(client, "sql")
        assert (first != plain, cached) == (True, 0), "no prefix of the model's"
        assert (await tokens(client, "sql"))[1] > 0
        assert (await tokens(client, MODEL))[0] == plain
        # A worker that starts again has it too, and none without it is asked.
        for name in ("decode-0", "prefill-0"):
            mesh[name].kill()
            await mesh.restart(name)
            await mesh.all_known()
            await listed(mesh, "sql")
            assert (await tokens(client, "sql"))[0] == first

        second = await loaded_again(mesh, client, sql, first)
        assert second != plain
        # What does not fit is refused, and nothing is changed.
        large = write(tmp_path / "large", b"large", rank=64)
        capsys.readouterr()
        assert await adapter(mesh, "load", f"large={large}") == 1
        assert "rank 64, and this worker takes up to 16" in capsys.readouterr().err
        await removed(mesh, client, second)
        # Clients of vLLM change adapters over HTTP.
        async with aiohttp.ClientSession(mesh.url, raise_for_status=True) as session:
            sql_again = {"lora_name": "sql", "lora_path": str(sql)}
            await session.post("/v1/load_lora_adapter", json=sql_again)
            assert (await tokens(client, "sql"))[0] == second
            await session.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        capsys.readouterr()
        assert await adapter(mesh, "list", "--json") == 0
        assert json.loads(capsys.readouterr().out) == []
        await mesh.idle()


async def loaded_again(mesh: Mesh, client: ApiClient, folder: Path, first: list[int]) -> list[int]:
    """With other weights under its name it is another adapter, for new requests alone."""
    async with client.stream(PROMPT, max_tokens=LONG, model="sql") as stream:
        await stream.read(5)
        write(folder, b"trained on")
        assert await adapter(mesh, "load", f"sql={folder}") == 0
        second, cached = await tokens(client, "sql")
        while second == first:  # the gateway hears of it a little later
            second, cached = await tokens(client, "sql")
        assert cached == 0
        answer = await stream.finish()
    assert answer.token_ids[:TOKENS] == first
    assert len(answer.token_ids) == LONG
    return second


async def removed(mesh: Mesh, client: ApiClient, expected: list[int]) -> None:
    """Removed, it gets nothing new; what runs ends as usual."""
    async with client.stream(PROMPT, max_tokens=LONG, model="sql") as stream:
        await stream.read(5)
        assert await adapter(mesh, "remove", "sql") == 0
        await listed(mesh)
        assert (await client.complete(PROMPT, max_tokens=1, model="sql")).status == 404
        answer = await stream.finish()
    assert answer.token_ids[:TOKENS] == expected
    assert len(answer.token_ids) == LONG
