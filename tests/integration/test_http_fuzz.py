"""Any request that the OpenAPI page allows, and any that it does not: never a 5xx, nothing held."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from kvmesh.core.config import environment
from tests.integration.gateway_stack import Stack, gateway_stack

ROUNDS = int(environment("KVMESH_FUZZ_ROUNDS", "1"))
"""More of them for a long run: `make fuzz`."""
EXAMPLES = 15 * ROUNDS
"""Requests per operation and mode."""
MUTATIONS = 300 * ROUNDS
REFUSED = 503
"""Also the answer to a request that no worker took within its deadline: told, not an error here."""

SETTINGS = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "n": 2,
    "seed": 7,
    "stop": ["x"],
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
    "stream_options": None,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "stop_token_ids": [3],
    "min_tokens": 1,
    "ignore_eos": False,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "chat_template_kwargs": {"a": 1},
    "cache_salt": "s",
    "request_id": "r",
    "user": "u",
}
COMPLETION = {**CHAT, "prompt": "one", "logprobs": 2, "echo": True, "suffix": None}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**32,
    2**64,
    -(2**63),
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "\ud800",
    "\U0001f600" * 10,
    "a" * 3000,
    [],
    [[]],
    [None],
    ["x"] * 200,
    [[1, 2], "x"],
    [[2**32 - 1]],
    {},
    {"": ""},
    {"type": "x"},
    {"type": "json_schema"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nothing"}}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"pattern": "(" * 500}}},
    {"role": "user", "content": "x"},
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "nobody", "content": None, "tool_calls": [{}]}],
]


@pytest.fixture
async def stack(tmp_path: Path) -> Any:
    # A short deadline: a request that no fake worker takes must not hold the test up.
    async with gateway_stack(tmp_path, limits={"ttft_deadline_ms": 500}) as running:
        yield running


def is_honest(status: int, body: Any) -> bool:
    """Below 500, or a refusal that says who refused and why."""
    refused = status == REFUSED and isinstance(body, dict) and body["error"]["code"] is not None
    return status < 500 or refused


@pytest.mark.slow
@pytest.mark.timeout(180 * ROUNDS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_what_the_page_allows_and_what_it_does_not(
    stack: Stack, mode: GenerationMode
) -> None:
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.get("/openapi.json") as answer,
    ):
        page = await answer.json()
    await asyncio.to_thread(check_operations, page, stack.url, mode)
    await stack.idle()


def check_operations(page: dict[str, Any], url: str, mode: GenerationMode) -> None:
    num_operations = 0
    schema: Any = schemathesis.openapi.from_dict(page)
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/ready":  # 503 is its honest answer
            continue
        if mode is GenerationMode.NEGATIVE and not list(operation.body):
            continue
        num_operations += 1

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            answer = case.call(base_url=url)
            text = answer.content[:500]
            body = json.loads(answer.content) if answer.status_code == REFUSED else None
            assert is_honest(answer.status_code, body), (case.method, case.path, case.body, text)

        check()
    assert num_operations >= 5


@pytest.mark.parametrize(
    ("path", "valid"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
)
async def test_senseless_values_in_every_field(stack: Stack, path: str, valid: Any) -> None:
    print("seed", seed := 20261121 + ROUNDS - 1)
    draw = random.Random(seed)
    statuses = set()
    async with aiohttp.ClientSession(stack.url) as session:
        for number in range(MUTATIONS):
            body = {
                name: draw.choice(VALUES) if draw.random() < 0.15 else value
                for name, value in valid.items()
                if draw.random() < 0.6 or name in ("prompt", "messages")
            }
            raw = json.dumps(body).encode()
            if number % 5 == 0:
                raw = damaged(draw, raw)
            async with session.post(path, data=raw) as answer:
                text = await answer.read()
                found = json.loads(text) if answer.status == REFUSED else None
                assert is_honest(answer.status, found), (answer.status, raw, text[:500])
                statuses.add(answer.status)
    assert {200, 400} <= statuses  # the fuzzer got past the door, and was refused
    await stack.idle()


def damaged(draw: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(draw.randint(1, 5)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.randint(0, len(data))])


@pytest.mark.parametrize("fields", [{"guided_grammar": "a"}, {"guided_grammar": 'x ::= "b"'}])
async def test_what_was_a_500_once(stack: Stack, fields: dict[str, Any]) -> None:
    body = {"prompt": "one", "max_tokens": 2, **fields}
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post("/v1/completions", json=body) as answer,
    ):
        assert answer.status == 400, await answer.text()


async def test_random_bytes_on_the_socket(stack: Stack) -> None:
    print("seed", seed := 20261121 + ROUNDS - 1)
    draw = random.Random(seed)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{}"
    for number in range(150):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(draw.randbytes(draw.randint(1, 300)) if number % 2 else damaged(draw, head))
        writer.write_eof()
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")), (number, answer[:200])
        writer.close()
    async with aiohttp.ClientSession(stack.url) as session, session.get("/health") as health:
        assert health.status == 200
    await stack.idle()
