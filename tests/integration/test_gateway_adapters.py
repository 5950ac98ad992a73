"""vLLM's routes for LoRA adapters, and what becomes of requests that name one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from services.gateway.config import HttpConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import CHAT, TWO_PAIRS, Stack, gateway_stack
from tests.integration.test_gateway_resume import TEXT, events_of, post, stacks, written
from tests.redis_server import redis_process

OPEN = HttpConfig(port=0, adapter_changes=True)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def said(session: aiohttp.ClientSession, path: str, **body: object) -> tuple[int, str]:
    async with session.post(path, json=body) as response:
        return response.status, await response.text()


async def test_adapters_are_loaded_and_unloaded_with_vllms_words(tmp_path: Path) -> None:
    async with (
        gateway_stack(tmp_path, TWO_PAIRS, http=OPEN) as stack,
        aiohttp.ClientSession(stack.url) as session,
    ):
        async with session.get("/openapi.json") as response:
            assert {LOAD, UNLOAD} <= set((await response.json())["paths"])
        sql = {"lora_name": "sql", "lora_path": "/a"}
        assert await said(session, LOAD, **sql) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        # The next request finds it, in the list and as a model.
        assert stack.gateway.entrance.names == [MODEL, "sql"]
        answer = await stack.client.chat.completions.create(**{**CHAT, "model": "sql"})
        assert answer.model == "sql"
        assert stack.mesh.queries[-1].adapter == "sql@/a"
        specs = [spec for worker in stack.mesh.workers.values() for spec in worker.specs]
        assert {spec.adapter for spec in specs} == {"sql@/a"}

        status, text = await said(session, LOAD, **sql)
        assert (status, "already been loaded" in text) == (400, True)
        again = {"lora_path": "/b", "load_inplace": True}
        assert (await said(session, LOAD, **{**sql, **again}))[0] == 200
        assert dict(stack.gateway.entrance.frontends[0].served.adapters) == {"sql": "sql@/b"}

        assert await said(session, UNLOAD, lora_name="sql", lora_int_id=1) == (
            200,
            "Success: LoRA adapter 'sql' removed successfully.",
        )
        assert stack.gateway.entrance.names == [MODEL]
        status, text = await said(session, UNLOAD, lora_name="sql")
        assert (status, "cannot be found" in text) == (404, True)
        await stack.idle()


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"lora_name": "sql"}, 400, "lora_path"),
        ({"lora_name": "", "lora_path": "/a"}, 400, "lora_name"),
        ({"lora_name": MODEL, "lora_path": "/a"}, 400, "conflicts with a served base model"),
        ({"lora_name": "sql", "lora_path": "/a", "model": "other"}, 404, "does not exist here"),
        ({"lora_name": "sql", "lora_path": "/a"}, 400, "all 2 places are taken"),
    ],
)
async def test_what_cannot_be_loaded_says_why(
    body: dict[str, str], status: int, why: str, tmp_path: Path
) -> None:
    async with (
        gateway_stack(tmp_path, http=OPEN) as stack,
        aiohttp.ClientSession(stack.url) as session,
    ):
        stack.mesh.refuse_adapters = "all 2 places are taken"
        found, text = await said(session, LOAD, **body)
        assert (found, why in text) == (status, True), text
        assert stack.gateway.entrance.names == [MODEL]


async def test_the_routes_are_closed_unless_opened(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path) as stack, aiohttp.ClientSession(stack.url) as session:
        for path in (LOAD, UNLOAD):
            status, _ = await said(session, path, lora_name="sql", lora_path="/a")
            assert status == 404


async def have(stack: Stack, *adapters: str) -> None:
    """All workers have these adapters from now on."""
    for worker in stack.mesh.workers.values():
        worker.info = replace(worker.info, adapters=adapters)
    seen = stack.mesh.fleet_seen
    stack.mesh.changed.set()
    await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)
    await stack.mesh.until(
        lambda: list(stack.gateway.entrance.frontends[0].served.adapters.values()) == [*adapters]
    )


async def test_a_stream_goes_on_elsewhere_with_the_weights_that_it_began_with(
    tmp_path: Path,
) -> None:
    body = {**TEXT, "model": "sql"}
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis, limits={"ttft_deadline_ms": 500}) as (one, other):
            await have(one, "sql@1")
            await have(other, "sql@2")
            _, raw, _ = await post(one, "completions", body)
            events = events_of(raw)
            await written(one)
            for again in (body, None):  # from the id alone, and from the journal
                status, raw, _ = await post(other, "completions", again, events[9].last_id)
                assert status == 200, raw
                assert [each.data for each in events_of(raw)] == [each.data for each in events[10:]]
                assert other.mesh.workers["p1"].specs[-1].adapter == "sql@1"
            await post(other, "completions", body)
            assert other.mesh.workers["p1"].specs[-1].adapter == "sql@2", "a new stream"


async def test_a_stream_of_an_adapter_is_not_one_of_the_model(tmp_path: Path) -> None:
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis) as (one, other):
            for each in (one, other):
                await have(each, "py@1", "sql@1")
            _, raw, _ = await post(one, "completions", {**TEXT, "model": "sql"})
            last_id = events_of(raw)[9].last_id
            for name in (MODEL, "py"):
                status, raw, _ = await post(other, "completions", {**TEXT, "model": name}, last_id)
                assert status in (400, 410), raw
