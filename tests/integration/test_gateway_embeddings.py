"""POST /v1/embeddings with the official client, on a fake mesh."""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.core.types import RefusalReason
from tests.integration.gateway_fake_worker import MODEL, embedding_of
from tests.integration.gateway_stack import Stack, gateway_stack


async def embeds(stack: Stack, engine: str, max_model_len: int, *, can: bool) -> None:
    """Gives the workers an engine and waits until the gateway knows, by their longest prompt."""
    for worker in stack.mesh.workers.values():
        layout = dataclasses.replace(worker.info.layout, engine=engine)
        changes = {"embeds": can, "layout": layout, "max_model_len": max_model_len}
        worker.info = dataclasses.replace(worker.info, **changes)  # type: ignore[arg-type]
    stack.mesh.changed.set()
    frontend = stack.gateway.entrance.of(MODEL)
    await stack.mesh.until(lambda: frontend.max_model_len == max_model_len)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, limits={"max_prompts": 4}) as stack:
        await embeds(stack, "vllm", 500, can=True)
        yield stack
        await stack.idle()


async def post(stack: Stack, body: dict[str, Any]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post("/v1/embeddings", json=body) as response,
    ):
        return response.status, await response.json()


async def test_each_input_has_its_vector(stack: Stack) -> None:
    texts = ["one request", "another one", "one request"]
    found = await stack.client.embeddings.create(model=MODEL, input=texts)
    prompts = [tuple(stack.tokenizer.encode(text).ids) for text in texts]
    assert [each.index for each in found.data] == [0, 1, 2]
    for each, prompt in zip(found.data, prompts, strict=True):
        assert struct.pack(f"<{len(each.embedding)}f", *each.embedding) == embedding_of(prompt, 0)
    num_tokens = sum(map(len, prompts))
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (num_tokens, num_tokens)
    assert (found.model, found.object) == (MODEL, "list")
    specs = stack.mesh.workers["p1"].specs
    assert sorted(spec.token_ids for spec in specs) == sorted(prompts)
    assert {(spec.embedding, spec.sampling.max_tokens) for spec in specs} == {(0, 1)}


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]], "text", ["text"]])
async def test_inputs_are_texts_or_tokens(stack: Stack, given: Any) -> None:
    for encoding in ("float", "base64"):
        body = {"input": given, "encoding_format": encoding, "dimensions": 3}
        status, answer = await post(stack, body)
        assert status == 200, answer
        prompts = [stack.tokenizer.encode("text").ids] if "text" in given else given
        if isinstance(prompts[0], int):
            prompts = [prompts]
        for entry, prompt in zip(answer["data"], prompts, strict=True):
            vector = entry["embedding"]
            raw = base64.b64decode(vector) if encoding == "base64" else struct.pack("<3f", *vector)
            assert raw == embedding_of(tuple(prompt), 3)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a"] * 5}, "input"),
        ({"input": [320]}, "input"),
        ({"input": ""}, "input"),
        ({"input": [7] * 600}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"use_activation": False}, "use_activation"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ({"model": "other"}, "model"),
    ],
)
async def test_bad_fields_are_named(stack: Stack, change: dict[str, Any], param: str) -> None:
    status, body = await post(stack, {"input": "a", **change})
    assert (status, body["error"]["param"]) == (404 if param == "model" else 400, param)


async def test_what_no_worker_computes_is_refused_at_once(stack: Stack) -> None:
    for worker in stack.mesh.workers.values():
        worker.does.reject_offers = -1
        worker.does.offer_reason = RefusalReason.INVALID
    status, body = await post(stack, {"input": "a", "dimensions": 3})
    assert (status, body["error"]["code"]) == (400, "invalid_value")
    assert "told to reject" in body["error"]["message"]


@pytest.mark.parametrize(
    ("engine", "todo"), [("kvmesh", "--engine.kind vllm"), ("vllm", "last token")]
)
async def test_an_engine_without_embeddings_is_named(stack: Stack, engine: str, todo: str) -> None:
    await embeds(stack, engine, 400, can=False)
    with pytest.raises(openai.BadRequestError, match=f"engine {engine}, which .*{todo}"):
        await stack.client.embeddings.create(model=MODEL, input="hi")


async def test_prompts_are_counted_and_no_generated_tokens(stack: Stack) -> None:
    found = await stack.client.embeddings.create(model=MODEL, input=["one", "two words"])
    await stack.idle()
    value = stack.gateway.metrics.value
    assert value("vllm:prompt_tokens_total", model_name=MODEL) == found.usage.total_tokens
    assert value("vllm:generation_tokens_total", model_name=MODEL) == 0
    finished = {"model_name": MODEL, "finished_reason": "length"}
    assert value("vllm:request_success_total", **finished) == 2
