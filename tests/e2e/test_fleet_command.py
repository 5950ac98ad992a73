"""`kvmesh fleet` against a real mesh: each order has the effect that it promises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.__main__ import main
from kvmesh.cli.health import check_health
from tests.e2e.api_client import ApiClient, placed
from tests.mesh_processes import Flags, Mesh, fake_tokens, running_mesh

# Each starts a mesh of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = list(range(10, 60))


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A mesh of its own: its workers are sent away."""
    step: Flags = {"engine.fake-step-s": 0.01}
    flags: dict[str, Flags] = {
        # Else it might take a role back.
        "scheduler": {"planning.roles": "off"},
        "prefill": step,
        "decode": step,
    }
    async with running_mesh(tmp_path, flags=flags) as mesh:
        yield mesh


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[ApiClient]:
    async with ApiClient(mesh.url) as client:
        yield client


async def fleet(mesh: Mesh, *arguments: str) -> int:
    """Runs the command as a user does; it has an event loop of its own."""
    secret = ("--secret-file", str(mesh.secret_file))
    scheduler = ("--scheduler", mesh["scheduler"].address, *secret)
    return await asyncio.to_thread(main, ["fleet", *arguments, *scheduler])


async def listed(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert await fleet(mesh, "list", "--json") == 0
    return {row["worker_id"]: row for row in json.loads(capsys.readouterr().out)}


async def prefill_workers(client: ApiClient, count: int = 8) -> set[str]:
    """Who computed some prompts that nobody has cached."""
    answers = [
        await client.complete([start] * 40, max_tokens=2, headers=placed("disaggregated"))
        for start in range(100, 100 + count)
    ]
    return {answer.prefill_worker for answer in answers if answer.ok}


async def test_orders_to_workers(
    mesh: Mesh, client: ApiClient, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = await listed(mesh, capsys)
    assert {name: row["role"] for name, row in rows.items()} == {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    assert {row["state"] for row in rows.values()} == {"ready"}

    assert await fleet(mesh, "cordon", "prefill-0") == 0
    assert (await listed(mesh, capsys))["prefill-0"]["state"] == "cordoned"
    assert await prefill_workers(client) == {"prefill-1"}

    # Nothing is lost over a role switch, and the switched worker is used for its new role only.
    assert await fleet(mesh, "uncordon", "prefill-0") == 0
    assert await fleet(mesh, "set-role", "prefill-1", "decode") == 0
    rows = await listed(mesh, capsys)
    assert rows["prefill-1"]["role"] == "decode"
    assert rows["prefill-0"]["state"] == "ready"
    assert await prefill_workers(client) == {"prefill-0"}
    await mesh.idle()


async def test_a_drained_worker_finishes_its_streams_and_leaves(
    mesh: Mesh, client: ApiClient, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client.stream(PROMPT, headers=placed("disaggregated"), max_tokens=120) as stream:
        await stream.read(3)
        name = stream.answer.decode_worker
        draining = asyncio.create_task(fleet(mesh, "drain", name))
        answer = await stream.finish()
        assert await draining == 0
    assert answer.token_ids == fake_tokens(PROMPT, 120)
    assert answer.decode_worker == name
    assert mesh["gateway"].event("request_lost_by_worker") is None
    rows = await listed(mesh, capsys)
    assert name not in rows
    assert len(rows) == 3
    assert mesh[name].running
    health = await asyncio.to_thread(check_health, mesh[name].address, 5.0)
    assert health == "NOT_SERVING"
    again = await client.complete(PROMPT, headers=placed("disaggregated"), max_tokens=5)
    assert again.token_ids == fake_tokens(PROMPT, 5)
    assert again.decode_worker != name
    await mesh.idle()


async def test_what_cannot_be_done_is_said(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    assert await fleet(mesh, "cordon", "nobody") == 1
    shown = capsys.readouterr().err
    assert "no worker 'nobody'" in shown
    assert "decode-0" in shown
    nowhere = ["fleet", "list", "--scheduler", "127.0.0.1:1", "--timeout", "0.2"]
    assert await asyncio.to_thread(main, nowhere) == 1
    assert "no scheduler answers at 127.0.0.1:1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["fleet", "set-role", "decode-0", "dancer"])
    assert caught.value.code == 2
