"""One gateway before the fleets of several models: each call goes to its model's workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.client import AsyncClient
from kvmesh.core.errors import ConfigError
from services.gateway.config import ModelConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import CHAT, TWO_PAIRS, Stack, gateway_stack
from tests.unit.gateway.tiny_model import write_model

OTHER, SHORT = "org/other", "other"
OTHERS = {"p2", "d2"}


@asynccontextmanager
async def two_fleets(folder: Path) -> AsyncIterator[Stack]:
    """Workers 1 have one model and workers 2 the other, whose template says more."""
    (folder / "b").mkdir()
    write_model(folder / "b")
    template = "{{ 'You are the other model. ' }}" + (folder / "b/chat_template.jinja").read_text()
    (folder / "b/chat_template.jinja").write_text(template)
    others = f"{OTHER}={folder / 'b'},{SHORT}={folder / 'b'}"
    model = ModelConfig(path=str(folder), served_name=MODEL, aliases="small", others=others)
    async with gateway_stack(folder, TWO_PAIRS, model=model) as stack:
        for name in OTHERS:
            info = stack.mesh.workers[name].info
            layout = replace(info.layout, model_fingerprint="another")
            stack.mesh.workers[name].info = replace(
                info, model=OTHER, layout=layout, adapters=("sql@1",), max_model_len=300
            )
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: "sql" in stack.gateway.entrance.names)
        yield stack


def prefilled(stack: Stack, name: str) -> int:
    return len(stack.mesh.workers[name].specs)


async def test_each_call_goes_to_the_workers_of_its_model(tmp_path: Path) -> None:
    async with two_fleets(tmp_path) as stack:
        listed = [each.to_dict() async for each in stack.client.models.list()]
        assert [each["id"] for each in listed] == [MODEL, "small", OTHER, SHORT, "sql"]
        assert [each["root"] for each in listed] == [MODEL, MODEL, OTHER, OTHER, "sql"]
        assert listed[-1]["parent"] == OTHER
        assert {each["max_model_len"] for each in listed[2:]} == {300}
        assert listed[0]["max_model_len"] != 300
        lengths = {}
        for name, worker in ((MODEL, "p1"), ("small", "p1"), (OTHER, "p2"), ("sql", "p2")):
            before = {each: prefilled(stack, each) for each in ("p1", "p2")}
            answer = await stack.client.chat.completions.create(**{**CHAT, "model": name})
            assert answer.usage is not None
            lengths[name] = answer.usage.prompt_tokens
            after = {each: prefilled(stack, each) for each in ("p1", "p2")}
            assert {each for each in after if after[each] > before[each]} == {worker}, name
            spec = stack.mesh.workers[worker].specs[-1]
            layout = stack.mesh.workers[worker].info.layout
            assert spec.fingerprint in ("", layout.model_fingerprint)
            assert spec.adapter == ("sql@1" if name == "sql" else "")
        # Each has its own template.
        assert lengths[MODEL] == lengths["small"] < lengths[OTHER] == lengths["sql"]
        value = stack.gateway.metrics.value
        assert value("vllm:prompt_tokens_total", model_name=MODEL) == 2 * lengths[MODEL]
        assert value("vllm:prompt_tokens_total", model_name=OTHER) == 2 * lengths[OTHER]
        await stack.idle()


async def test_no_model_is_the_first_and_an_unknown_one_names_all(tmp_path: Path) -> None:
    async with two_fleets(tmp_path) as stack, aiohttp.ClientSession(stack.url) as session:
        paths: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": CHAT["messages"]},
            "/v1/completions": {"prompt": "hi"},
            "/v1/responses": {"input": "hi", "store": False},
            "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 5},
            "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
            "/tokenize": {"messages": CHAT["messages"]},
            "/detokenize": {"tokens": [5]},
        }
        for path, body in paths.items():
            async with session.post(path, json={**body, "model": "nobody"}) as response:
                assert response.status == 404, path
                text = await response.text()
                assert f"served: {MODEL}, small, {OTHER}, {SHORT}, sql" in text, path
            for model in (OTHER, MODEL):
                async with session.post(path, json={**body, "model": model}) as response:
                    assert response.status == 200, (path, await response.text())
        counts = []
        for named in (None, MODEL, OTHER):
            body = {"messages": CHAT["messages"], "model": named}
            async with session.post("/tokenize", json=body) as response:
                counts.append((await response.json())["count"])
        assert counts[0] == counts[1] < counts[2]
        async with session.get("/tokenizer_info", params={"model": OTHER}) as response:
            assert "the other model" in (await response.json())["chat_template"]
        async with session.get("/tokenizer_info", params={"model": "nobody"}) as response:
            assert response.status == 404
        await stack.idle()


async def test_the_library_finds_both(tmp_path: Path) -> None:
    async with two_fleets(tmp_path) as stack:
        async with AsyncClient(f"127.0.0.1:{stack.context.port}") as client:
            models = {each.name: each.max_model_len for each in await client.list_models()}
            assert set(models) == {MODEL, "small", OTHER, SHORT, "sql"}
            assert models[OTHER] == 300 != models[MODEL]
            before = prefilled(stack, "p2")
            await client.generate("hi", model=OTHER, max_tokens=5)
            assert prefilled(stack, "p2") == before + 1
        await stack.idle()


async def test_one_model_is_served_while_the_other_has_no_workers(tmp_path: Path) -> None:
    async with two_fleets(tmp_path) as stack, aiohttp.ClientSession(stack.url) as session:
        workers = {name: stack.mesh.workers.pop(name) for name in OTHERS}
        entrance = stack.gateway.entrance
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: "sql" not in entrance.names)
        async with session.get("/ready") as response:
            assert response.status == 200
            assert "no decode worker" in (await response.json())["not_ready"][OTHER]
        answer = await stack.client.chat.completions.create(**CHAT)
        assert answer.model == MODEL
        in_vain = {**CHAT, "model": OTHER, "extra_headers": {"x-slo-ttft-ms": "2000"}}
        with pytest.raises(openai.InternalServerError, match=OTHER):
            await stack.client.chat.completions.create(**in_vain)
        first = {name: stack.mesh.workers.pop(name) for name in ("p1", "d1")}
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: len(entrance.not_ready) == 2)
        async with session.get("/ready") as response:
            assert response.status == 503
            assert OTHER in await response.text()
        stack.mesh.workers.update(workers)
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: OTHER not in entrance.not_ready)
        async with session.get("/ready") as response:
            assert response.status == 200
            assert MODEL in (await response.json())["not_ready"]
        stack.mesh.workers.update(first)
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: not entrance.not_ready)
        await stack.idle()


async def test_scores_are_refused_by_name(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path) as stack:
        with pytest.raises(openai.NotFoundError, match="but no scores"):
            await stack.client.post("/rerank", body={}, cast_to=dict[str, str])
        with pytest.raises(openai.NotFoundError, match="/v1/embedding does not exist"):
            await stack.client.post("/embedding", body={}, cast_to=dict[str, str])


@pytest.mark.parametrize("others", ["a", "=b", "a=", "tiny=x", "a=x,a=y", "small=x"])
def test_names_that_do_not_tell_models_apart(others: str) -> None:
    config = ModelConfig(path="m", served_name="tiny", aliases="small", others=others)
    with pytest.raises(ConfigError, match=r"model\.others"):
        _ = config.every
