"""The console on the admin port of a real gateway."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvmesh.runtime.admin_config import AdminConfig
from kvmesh.runtime.app import ServerConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import PAIR, Stack, gateway_stack

STATIC = Path(__file__).parents[2] / "libs/kvmesh/console/static"


class Console:
    """Asks a gateway's console."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.session = session
        self.url = f"http://127.0.0.1:{stack.context.admin.port}"

    async def json(self, path: str) -> dict[str, Any]:
        async with self.session.get(f"{self.url}{path}") as response:
            assert response.status == 200, await response.text()
            content: dict[str, Any] = await response.json()
            return content

    async def status(self, path: str) -> int:
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status

    async def until(self, path: str, *fields: str) -> dict[str, Any]:
        """A snapshot in which the fields are not empty."""
        while True:
            content = await self.json(path)
            if all(content[field] for field in fields):
                return content


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[Console]:
    server = ServerConfig(admin=AdminConfig(port=0))
    async with gateway_stack(tmp_path, server=server) as stack, aiohttp.ClientSession() as session:
        yield Console(stack, session)


async def test_a_finished_request_is_in_the_snapshot_with_its_timeline(console: Console) -> None:
    answer = await console.stack.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        extra_headers={"x-request-id": "mine"},
    )
    assert answer.choices[0].message.content
    await console.stack.idle()
    shown = await console.until("/console/snapshot", "workers", "history")
    assert {each["id"]: each["role"] for each in shown["workers"]} == {
        name: role.value for name, role in PAIR.items()
    }
    assert shown["fresh"] is True
    assert (shown["open"], shown["ended_total"], shown["flows"]) == (0, 1, [])
    (request,) = shown["requests"]
    assert request["id"].startswith("mine-")
    assert request["output_tokens"] == answer.usage.completion_tokens if answer.usage else False

    one = await console.json("/console/requests/mine")
    assert [each["phase"] for each in one["phases"]] == ["waiting", "prefill", "handoff", "decode"]
    assert [each["worker"] for each in one["phases"]] == ["", "p1", "p1", "d1"]
    what = [event["what"] for event in one["events"]]
    assert what == ["routed", "reserved", "accepted", "first_token", "handed_off"]
    assert one["phases"][-1]["end_ms"] == pytest.approx(one["elapsed_ms"], abs=0.01)
    assert await console.status("/console/requests/yours") == 404


async def test_a_stream_is_followed_token_by_token(console: Console) -> None:
    console.stack.says("a stream of some more words")
    pieces = await console.stack.client.completions.create(
        model=MODEL,
        prompt="hello",
        max_tokens=3,
        stream=True,
        extra_headers={"x-request-id": "streamed"},
    )
    async for _ in pieces:
        pass
    await console.stack.idle()
    one = await console.json("/console/requests/streamed")
    assert (one["output_tokens"], one["finish"]) == (3, "length")
    assert [each["phase"] for each in one["phases"]] == ["waiting", "prefill", "handoff", "decode"]


async def test_refusals_and_moves_are_seen(console: Console) -> None:
    console.stack.mesh.workers["p1"].does.reject_offers = 2
    await console.stack.client.completions.create(
        model=MODEL, prompt="hello", extra_headers={"x-request-id": "slow"}
    )
    shown = await console.json("/console/snapshot")
    assert shown["refusals"] == [{"stage": "prefill", "reason": "busy", "count": 2}]
    one = await console.json("/console/requests/slow")
    assert one["refusals"] == 2
    refused = [event for event in one["events"] if event["what"] == "refused"]
    assert [(event["worker"], event["text"]) for event in refused] == [("p1", "prefill: busy")] * 2


async def test_the_stream_sends_snapshots_and_ends_with_its_reader(console: Console) -> None:
    async with console.session.get(f"{console.url}/console/events") as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert (await response.content.readline()) == b"event: snapshot\n"
        line = await response.content.readline()
        assert json.loads(line.removeprefix(b"data: "))["model"] == MODEL


async def test_the_page_is_served_whole_and_nothing_else(console: Console) -> None:
    async with console.session.get(f"{console.url}/") as response:
        assert response.url.path == "/console"
        assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        page = await response.text()
    wanted = set(re.findall(r'(?:src|href)="(/[^"]+)"', page))
    for script in STATIC.glob("*.js"):
        wanted |= {
            f"/console/{name}" for name in re.findall(r'from "\./([^"]+)"', script.read_text())
        }
    assert {f"/console/{file.name}" for file in STATIC.iterdir()} - {
        "/console/index.html"
    } == wanted
    for path in wanted:
        assert await console.status(path) == 200, path
    for path in ("/console/page.py", "/console/..%2fpage.py", "/console/", "/static/main.js"):
        assert await console.status(path) == 404, path


def test_nothing_is_loaded_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        urls = set(re.findall(r"(?:https?:)?//[a-z][^\s\"')]*", file.read_text()))
        assert urls <= {"http://www.w3.org/2000/svg"}, file


async def test_the_console_needs_the_admin_token(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    server = ServerConfig(admin=AdminConfig(port=0, token=token))
    async with gateway_stack(tmp_path, server=server) as stack, aiohttp.ClientSession() as session:
        console = Console(stack, session)
        for path in ("/console", "/console/snapshot", "/console/events", "/console/main.js"):
            assert await console.status(path) == 401, path
        session.headers["Authorization"] = f"Bearer {token}"
        assert await console.status("/console/snapshot") == 200
