"""The gateway over its real HTTP port, with the official client, in front of a fake mesh."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.core.types import Placement
from kvmesh.kv.hashing import chain_hashes, root_hash
from services.gateway.config import ModelConfig
from tests.integration.gateway_fake_worker import LAYOUT, MODEL
from tests.integration.gateway_fakes import draining
from tests.integration.gateway_stack import CHAT, TWO_PAIRS, Stack, gateway_stack
from tests.unit.gateway.tiny_model import EOS
from tests.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path) as stack:
        yield stack


async def test_chat_without_stream(stack: Stack) -> None:
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert choice.message.content == "one request, one handoff"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = stack.tokenizer.encode("<|start|>user\nhello<|end|>\n<|start|>assistant\n").ids
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(stack.mesh.output) + 1  # with end-of-sequence
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    extra = answer.model_extra or {}
    assert extra["prompt_token_ids"] == prompt
    assert (choice.model_extra or {})["token_ids"] == [*stack.mesh.output, EOS]
    await stack.idle()


async def test_chat_stream_with_usage(stack: Stack) -> None:
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == "one request, one handoff"
    assert len([delta for delta in deltas if delta]) > 3
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop"
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(stack.mesh.output) + 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    await stack.idle()


async def test_sse_framing_and_headers(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 3}
    headers = {"x-request-id": "my-request", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response,
    ):
        raw = await response.text()
        assert response.content_type == "text/event-stream"
        assert response.headers["x-request-id"] == "my-request"
        assert response.headers["x-kvmesh-prefill-worker"] == "p1"
        assert response.headers["x-kvmesh-decode-worker"] == "d1"
        assert response.headers["x-kvmesh-placement"] == "disaggregated"
        assert response.headers["x-kvmesh-decision"] == "load; prefill=p1; decode=d1"
    events = raw.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-my-request"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    expected = stack.tokenizer.decode(stack.mesh.output[:3])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    # The trace of the caller goes on at the workers.
    told = stack.mesh.workers["p1"].traceparents + stack.mesh.workers["d1"].traceparents
    assert {value.split("-")[1] for value in told} == {"a" * 32}


async def test_completions_prompt_forms_and_n(stack: Stack) -> None:
    prompts: list[Any] = ["ab", ["ab", "the"], [5, 6, 7], [[5, 6], [7, 8, 9]]]
    num_prompt_tokens = []
    for prompt in prompts:
        answer = await stack.client.completions.create(
            model=MODEL, prompt=prompt, n=2, max_tokens=4, seed=10
        )
        num_prompts = 2 if isinstance(prompt[0], list) or len(prompt) == 2 else 1
        num_prompts = 1 if isinstance(prompt, str) else num_prompts
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8 * num_prompts
        num_prompt_tokens.append(answer.usage.prompt_tokens)
    assert num_prompt_tokens[2:] == [3, 5]
    specs = stack.mesh.workers["p1"].specs
    assert [spec.sampling.seed for spec in specs[:2]] == [10, 11]
    names = [request_id for request_id, _ in stack.mesh.workers["p1"].offers]
    assert len(set(names)) == len(names)
    await stack.idle()


async def test_random_seeds_differ(stack: Stack) -> None:
    for _ in range(2):
        await stack.client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    first, second = (spec.sampling.seed for spec in stack.mesh.workers["p1"].specs)
    assert first != second


async def test_streamed_choices_are_complete(stack: Stack) -> None:
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, stream=True
    )
    texts = {0: "", 1: "", 2: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert set(texts.values()) == {"one request, one handoff"}
    await stack.idle()


async def test_sampling_reaches_workers(stack: Stack) -> None:
    await stack.client.completions.create(
        model=MODEL,
        prompt="a",
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        seed=-1,
        max_tokens=9,
        extra_body={
            "top_k": -1,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [77],
        },
    )
    sampling = stack.mesh.workers["p1"].specs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (2**64 - 1, 9, 2)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (77,))


async def test_logprobs_in_both_forms(stack: Stack) -> None:
    chat = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert [entry.logprob for entry in content] == [-t / 8 for t in stack.mesh.output[:3]]
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -1.5]
    assert bytes(content[0].bytes or []).decode() == content[0].token
    text = await stack.client.completions.create(model=MODEL, prompt="a", max_tokens=3, logprobs=2)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == text.choices[0].text
    assert logprobs.token_logprobs == [-t / 8 for t in stack.mesh.output[:3]]
    lengths = [len(token) for token in logprobs.tokens or []]
    assert logprobs.text_offset == [0, lengths[0], lengths[0] + lengths[1]]


async def test_stop_string_across_chunks(stack: Stack) -> None:
    stack.says("alpha STOP")
    stack.mesh.output += stack.tokenizer.encode("PED beta").ids
    stream = await stack.client.completions.create(
        model=MODEL, prompt="a", stop=["STOPPED"], max_tokens=400, stream=True
    )
    pieces = [chunk.choices[0] async for chunk in stream]
    seen = ""
    for piece in pieces:
        seen += piece.text
        assert "alpha ".startswith(seen)  # no part of the stop string is ever sent
    assert seen == "alpha "
    assert pieces[-1].finish_reason == "stop"
    # The mesh stops as well, though it had more to say.
    await stack.idle()
    kept = await stack.client.completions.create(
        model=MODEL,
        prompt="a",
        stop="STOPPED",
        max_tokens=400,
        extra_body={"include_stop_str_in_output": True},
    )
    assert kept.choices[0].text == "alpha STOPPED"


async def test_characters_are_never_cut(stack: Stack) -> None:
    text = "naïve 🙂 ok"
    stack.says(text)
    stream = await stack.client.completions.create(
        model=MODEL, prompt="a", max_tokens=100, stream=True
    )
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


async def test_first_token_may_be_the_last(stack: Stack) -> None:
    answer = await stack.client.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    await stack.idle()
    # The reservation, never used, was given back.
    assert stack.mesh.workers["d1"].cancels == stack.mesh.workers["d1"].reserves


@pytest.mark.parametrize("starts", [True, False])
async def test_aggregated_by_header(stack: Stack, starts: bool) -> None:
    worker = stack.mesh.workers["p1"]
    worker.does.starts = starts
    raw = await stack.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, extra_headers={"x-kvmesh-placement": "aggregated"}
    )
    assert raw.headers["x-kvmesh-placement"] == "aggregated"
    assert raw.headers["x-kvmesh-prefill-worker"] == raw.headers["x-kvmesh-decode-worker"] == "p1"
    assert raw.parse().choices[0].message.content == "one request, one handoff"
    assert stack.mesh.queries[0].placement is Placement.AGGREGATED
    assert stack.mesh.workers["d1"].reserves == []
    # One message, or one after the other at a worker that only reserves.
    assert [len(worker.started), len(worker.offers)] == ([1, 0] if starts else [0, 1])
    await stack.idle()


async def test_routing_hints_reach_the_scheduler(stack: Stack) -> None:
    prompt = list(range(10, 50))
    for salt in ("", "tenant"):
        await stack.client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=5,
            extra_headers={"x-kvmesh-scenario": "chat", "x-slo-ttft-ms": "5000"},
            extra_body={"cache_salt": salt},
        )
    plain, salted = stack.mesh.queries
    assert (plain.scenario, plain.num_tokens, plain.max_new_tokens) == ("chat", 40, 5)
    assert 0 < plain.ttft_budget_ms <= 5000
    root = root_hash(LAYOUT.model_fingerprint)
    assert list(plain.block_hashes) == chain_hashes(root, prompt, LAYOUT.block_size)
    assert len(plain.block_hashes) == 2
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    assert stack.mesh.workers["p1"].specs[0].root_hash == root


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"suffix": "b"}, "suffix"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [9999]}, "prompt"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_fields(stack: Stack, change: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "prompt": "a", **change}
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.post("/completions", body=body, cast_to=object)
    error: Any = caught.value.body
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"
    assert stack.mesh.queries == []


async def test_bad_headers_name_themselves(stack: Stack) -> None:
    for name, value in (
        ("x-kvmesh-placement", "elsewhere"),
        ("x-slo-ttft-ms", "soon"),
        ("x-slo-tpot-ms", "0"),
        ("x-slo-itl-ms", "-1"),
    ):
        with pytest.raises(openai.BadRequestError, match=name):
            await stack.client.completions.create(
                model=MODEL, prompt="a", extra_headers={name: value}
            )


async def test_http_errors_have_the_same_shape(stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await stack.client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    async with aiohttp.ClientSession(stack.url) as session:
        cases: list[tuple[str, str, bytes, int]] = [
            ("GET", "/v1/nothing", b"", 404),
            ("GET", "/v1/completions", b"", 405),
            ("POST", "/v1/completions", b"x" * (1 << 17), 413),
            ("POST", "/v1/completions", b"{not json", 400),
            ("POST", "/v1/completions", b"[1]", 400),
        ]
        for method, path, data, status in cases:
            async with session.request(method, path, data=data) as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
                assert response.headers["x-request-id"]


async def test_models_health_ready_version_metrics(stack: Stack) -> None:
    models = await stack.client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await stack.client.models.retrieve(MODEL)).id == MODEL
    await stack.client.completions.create(model=MODEL, prompt="ab", max_tokens=5)
    async with aiohttp.ClientSession(stack.url) as session:
        for path in ("/health", "/ready", "/version"):
            async with session.get(path) as response:
                assert response.status == 200
        async with session.get("/metrics") as response:
            text = await response.text()
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0' in text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 5.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text
    for phase in ("queue", "prefill", "decode", "inference"):
        assert f'vllm:request_{phase}_time_seconds_count{{model_name="tiny"}} 1.0' in text
    assert "kvmesh_gateway_requests_open 0.0" in text


async def test_ready_names_workers_without_native_code(tmp_path: Path) -> None:
    async with (
        gateway_stack(tmp_path, TWO_PAIRS) as stack,
        aiohttp.ClientSession(stack.url) as session,
    ):
        worker = stack.mesh.workers["d1"]
        worker.info = replace(worker.info, missing_native=("kernels",))
        seen = stack.mesh.fleet_seen
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)

        async def said() -> object:
            async with session.get("/ready") as response:
                assert response.status == 200
                return (await response.json()).get("missing_native")

        await until(said)
        assert await said() == {"d1": ["kernels"]}


async def test_metrics_tell_the_library_that_makes_tokens_of_prompts(stack: Stack) -> None:
    before = await stack.client.completions.create(model=MODEL, prompt="ab ö", max_tokens=2)
    metrics = stack.gateway.metrics
    await stack.mesh.until(
        lambda: metrics.value("kvmesh_gateway_tokenizer", library="fastokens") == 1
    )
    after = await stack.client.completions.create(model=MODEL, prompt="ab ö", max_tokens=2)
    assert before.usage == after.usage


async def test_ready_needs_both_roles(tmp_path: Path) -> None:
    async with (
        gateway_stack(tmp_path, TWO_PAIRS) as stack,
        aiohttp.ClientSession(stack.url) as session,
    ):
        async with session.get("/ready") as response:
            assert response.status == 200
            assert await response.json() == {"status": "ready"}
        for name in ("d1", "d2"):
            worker = stack.mesh.workers[name]
            worker.load = draining(worker.load)
        seen = stack.mesh.fleet_seen
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)
        while True:  # the view is on its way
            async with session.get("/ready") as response:
                if response.status == 503:
                    assert "no decode" in (await response.json())["error"]["message"]
                    break
        async with session.get("/health") as response:
            assert response.status == 200


async def test_adapters_and_aliases_are_models(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path), served_name=MODEL, aliases="gpt-4o, small")
    async with gateway_stack(tmp_path, model=model) as stack:
        for worker in stack.mesh.workers.values():
            worker.info = replace(worker.info, adapters=("sql@1",))
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: "sql" in stack.gateway.entrance.names)
        listed = [each async for each in stack.client.models.list()]
        assert [each.id for each in listed] == [MODEL, "gpt-4o", "small", "sql"]
        parents = [(each.to_dict()["root"], each.to_dict()["parent"]) for each in listed]
        assert parents == [(MODEL, None)] * 3 + [("sql", MODEL)]
        sent = stack.mesh.workers["p1"].specs
        names = []
        for name in (MODEL, "gpt-4o", "sql"):
            answer = await stack.client.chat.completions.create(**{**CHAT, "model": name})
            names.append(answer.model)
        assert names == [MODEL, MODEL, "sql"]
        assert [spec.adapter for spec in sent] == ["", "", "sql@1"]
        plain, alias, adapter = (spec.root_hash for spec in sent)
        assert plain == alias != adapter  # no prefix is shared with it
        with pytest.raises(openai.NotFoundError, match="served: tiny, gpt-4o, small, sql"):
            await stack.client.chat.completions.create(**{**CHAT, "model": "other"})
        await stack.idle()
