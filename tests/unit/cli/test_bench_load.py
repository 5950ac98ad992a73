from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvmesh.cli.bench_load import Load, LoadGenerator, find_model, plan_load
from kvmesh.cli.bench_metrics import RequestRecord
from kvmesh.core.errors import KvMeshError

LOAD = Load(
    url="http://127.0.0.1:1",
    model="m",
    num_requests=3,
    rate=0.0,
    input_tokens=4,
    output_tokens=2,
    seed=1,
)


class Server:
    """A completions API that answers each request with the next script."""

    def __init__(self) -> None:
        self.scripts: list[list[Any] | int] = []
        self.bodies: list[dict[str, Any]] = []
        self.num_active = 0
        self.max_active = 0
        self.models: Any = {"data": [{"id": "m"}]}
        self.key = ""

    def check(self, request: web.Request) -> None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.check(request)
        self.bodies.append(await request.json())
        script = self.scripts.pop(0) if self.scripts else GOOD
        if isinstance(script, int):
            return web.json_response({"error": {"message": "no"}}, status=script)
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in script:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
            await asyncio.sleep(0)
        self.num_active -= 1
        return response

    async def list_models(self, request: web.Request) -> web.Response:
        self.check(request)
        return web.json_response(self.models)


def _piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
GOOD: list[Any] = [_piece("a"), _piece("b"), _piece("", "length"), USAGE, "[DONE]"]


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def load(server: Server) -> AsyncIterator[Load]:
    app = web.Application()
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield replace(LOAD, url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


async def _run(load: Load) -> list[RequestRecord]:
    records, duration_s = await LoadGenerator(load, lambda _: None).run()
    assert duration_s > 0
    return records


async def test_completed_requests(server: Server, load: Load) -> None:
    for record in await _run(load):
        assert record.outcome == "completed"
        assert len(record.token_times_s) == 2  # the closing piece is no token
        assert record.sent_s < record.token_times_s[0] <= record.token_times_s[1] <= record.end_s
        assert (record.input_tokens, record.output_tokens) == (4, 2)
    for body in server.bodies:
        assert body["ignore_eos"] is body["stream"] is True
        assert (body["model"], body["max_tokens"], len(body["prompt"])) == ("m", 2, 4)


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (503, "refused"),
        (429, "refused"),
        (500, "error"),
        ([{"error": {"message": "worker gone"}}, "[DONE]"], "error"),
        ([_piece("a")], "error"),
        ([_piece("a", "length")], "error"),
        (["{"], "error"),
    ],
)
async def test_what_goes_wrong(
    server: Server, load: Load, script: list[Any] | int, outcome: str
) -> None:
    server.scripts = [script]
    [record] = await _run(replace(load, num_requests=1))
    assert record.outcome == outcome
    assert record.error


async def test_nobody_there() -> None:
    records = await _run(replace(LOAD, url="http://127.0.0.1:1"))
    assert [record.outcome for record in records] == ["error"] * 3
    with pytest.raises(KvMeshError, match="kvmesh up"):
        await find_model("http://127.0.0.1:1")


async def test_concurrency_is_a_limit(server: Server, load: Load) -> None:
    await _run(replace(load, num_requests=12, concurrency=2))
    assert server.max_active <= 2
    assert len(server.bodies) == 12


async def test_every_record_is_reported(load: Load) -> None:
    seen: list[RequestRecord] = []
    records, _ = await LoadGenerator(load, seen.append).run()
    assert sorted(seen, key=id) == sorted(records, key=id)


async def test_find_model(server: Server, load: Load) -> None:
    assert await find_model(load.url) == "m"
    server.models = {"data": []}
    with pytest.raises(KvMeshError, match="no model"):
        await find_model(load.url)


async def test_a_key_is_sent_where_one_is_asked_for(server: Server, load: Load) -> None:
    server.key = "secret"
    assert await find_model(load.url, "secret") == "m"
    records = await _run(replace(load, api_key="secret"))
    assert {record.outcome for record in records} == {"completed"}
    with pytest.raises(KvMeshError, match="asks for an API key: KVMESH_API_KEY"):
        await find_model(load.url)
    with pytest.raises(KvMeshError, match="does not accept the API key in KVMESH_API_KEY"):
        await find_model(load.url, "wrong")
    assert "secret" not in repr(replace(load, api_key="secret"))


def test_a_plan_follows_its_seed() -> None:
    load = replace(LOAD, num_requests=200, rate=4.0)
    assert plan_load(load) == plan_load(load)
    assert plan_load(load) != plan_load(replace(load, seed=2))


def test_arrivals_have_the_rate() -> None:
    planned = plan_load(replace(LOAD, num_requests=4000, rate=4.0, input_tokens=1))
    dues = [request.due_s for request in planned]
    assert dues[0] == 0.0
    assert dues == sorted(dues)
    assert dues[-1] == pytest.approx(1000, rel=0.1)
    assert all(request.due_s == 0 for request in plan_load(LOAD))


def test_prompts() -> None:
    for request in plan_load(replace(LOAD, vocab_size=20)):
        assert all(16 <= token < 20 for token in request.prompt if isinstance(token, int))
        assert len(request.prompt) == 4
    [text, *_] = plan_load(replace(LOAD, prompts="text"))
    assert isinstance(text.prompt, str)
    assert len(text.prompt.split()) == 4
