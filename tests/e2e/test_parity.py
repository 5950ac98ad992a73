"""What a request asks for does not depend on where it runs, nor on a worker that dies under it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.mesh_processes import MODEL, Mesh, running_mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "Return the absolute value of a number. The argument may be"
MESSAGES = [{"role": "user", "content": "What does str.join do?"}]

LONG_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 60, "maxLength": 70, "pattern": "^[a-z ]+$"},
        "kind": {"enum": ["function", "method", "class"]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 40,
            "maxItems": 45,
        },
    },
    "required": ["title", "kind", "numbers"],
    "additionalProperties": False,
}
LONG_GRAMMAR = """
start: line{30,40} "end"
line: "- " WORD ": " NUMBER "\\n"
WORD: /[a-z]{3,6}/
NUMBER: /[0-9]{1,3}/
"""
NOTE_TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {
                    "type": "string",
                    "minLength": 150,
                    "maxLength": 160,
                    "pattern": "^[a-z ]+$",
                }
            },
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Case:
    """A request; `looks` is a regular expression for its text."""

    path: str
    body: dict[str, Any]
    looks: str = ""


DRAWN = {"temperature": 0.9, "seed": 11}
MANY = {"max_tokens": 160, "ignore_eos": True}

CASES: dict[str, Case] = {
    "greedy": Case(TEXT, {"temperature": 0, **MANY}),
    "filters": Case(TEXT, {**DRAWN, **MANY, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    "penalties": Case(TEXT, {**DRAWN, **MANY, "presence_penalty": 1.0, "repetition_penalty": 1.2}),
    "bias": Case(TEXT, {**DRAWN, **MANY, "logit_bias": {"5": -100, "300": 4, "301": 4}}),
    "allowed": Case(TEXT, {**DRAWN, **MANY, "allowed_token_ids": list(range(300, 340))}),
    "bad_words": Case(TEXT, {"temperature": 0, **MANY, "bad_words": ["the", "a number", "int"]}),
    "logprobs": Case(TEXT, {**DRAWN, **MANY, "logprobs": 3}),
    "echo": Case(TEXT, {**DRAWN, **MANY, "logprobs": 2, "echo": True}, f"(?s){PROMPT}.*"),
    "choices": Case(TEXT, {**DRAWN, **MANY, "n": 2}),
    "chat": Case(CHAT, {**DRAWN, **MANY, "logprobs": True, "top_logprobs": 2}),
    "regex": Case(
        TEXT, {**DRAWN, "max_tokens": 900, "guided_regex": "[a-z ]{300,310}!"}, "[a-z ]+!"
    ),
    "grammar": Case(
        CHAT,
        {**DRAWN, "max_tokens": 900, "structured_outputs": {"grammar": LONG_GRAMMAR}},
        r"(- [a-z]{3,6}: [0-9]{1,3}\n){30,40}end",
    ),
    "json_schema": Case(
        CHAT,
        {
            **DRAWN,
            "max_tokens": 900,
            "response_format": {"type": "json_schema", "json_schema": {"schema": LONG_SCHEMA}},
        },
    ),
    "tool": Case(
        CHAT, {**DRAWN, "max_tokens": 900, "tools": [NOTE_TOOL], "tool_choice": "required"}
    ),
}


@dataclass
class Said:
    """One choice, put together from its chunks."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self.text += choice.get("text") or delta.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        for call in delta.get("tool_calls") or []:
            if "id" in call:
                self.calls.append("")
            self.calls[-1] += call["function"]["arguments"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        logprobs = choice["logprobs"] or {}
        self.logprobs += [entry for entry in logprobs.get("token_logprobs", []) if entry]
        self.logprobs += [entry["logprob"] for entry in logprobs.get("content", [])]


class Client:
    """Streams requests."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def events(self, name: str, headers: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        case = CASES[name]
        prompt = {"messages": MESSAGES} if case.path == CHAT else {"prompt": PROMPT}
        body = {"model": MODEL, "stream": True, "return_token_ids": True, **prompt, **case.body}
        async with self._session.post(
            f"{self._url}{case.path}", json=body, headers={"x-request-id": name, **headers}
        ) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    async def said(
        self, name: str, headers: dict[str, str], begun: asyncio.Queue[str] | None = None
    ) -> list[Said]:
        """The choices of a case; its name goes to `begun` after some tokens."""
        found: dict[int, Said] = {}
        num_events = 0
        async with aclosing(self.events(name, headers)) as events:  # type: ignore[type-var]
            async for event in events:
                assert "error" not in event, event
                num_events += 1
                if num_events == 12 and begun is not None:
                    begun.put_nowait(name)
                for choice in event["choices"]:
                    found.setdefault(choice["index"], Said()).add(choice)
        return [found[index] for index in sorted(found)]


def check_form(name: str, said: list[Said]) -> None:
    """The text is what was asked for."""
    case, first = CASES[name], said[0]
    if case.looks:
        assert re.fullmatch(case.looks, first.text), first.text
    if name == "json_schema":
        found = json.loads(first.text)
        assert set(found) == set(LONG_SCHEMA["required"])
        assert 40 <= len(found["numbers"]) <= 45
    if name == "tool":
        (arguments,) = first.calls
        assert 150 <= len(json.loads(arguments)["text"]) <= 160
        assert (first.text, first.finish_reason) == ("", "tool_calls")
    if name == "choices":
        assert said[0].token_ids != said[1].token_ids
    if name == "allowed":
        assert set(first.token_ids) <= set(range(300, 340))
    if "ignore_eos" in case.body:
        assert [(len(each.token_ids), each.finish_reason) for each in said] == [
            (160, "length")
        ] * len(said)


def assert_same(name: str, found: list[Said], expected: list[Said]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.text, one.calls, one.finish_reason) == (
            other.token_ids,
            other.text,
            other.calls,
            other.finish_reason,
        ), name
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3), name


async def all_cases(
    client: Client,
    headers: dict[str, str],
    begun: asyncio.Queue[str] | None = None,
    names: Collection[str] = tuple(CASES),
) -> dict[str, list[Said]]:
    found = await asyncio.gather(*(client.said(name, headers, begun) for name in names))
    return dict(zip(names, found, strict=True))


async def test_every_feature_is_the_same_everywhere_and_after_a_move(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, 1, 1, engine="kvmesh") as mesh:
        await check_all_ways(mesh, 150, lambda _name, _said: True)


async def check_all_ways(
    mesh: Mesh, timeout_s: float, has_form: Callable[[str, Said], bool]
) -> None:
    """All cases give the same aggregated, disaggregated and moved.

    Args:
        timeout_s: of each call.
        has_form: whether an answer is to have the form of its case.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(timeout_s)
    ) as session:
        client = Client(session, mesh.url)
        together = await all_cases(client, {"x-kvmesh-placement": "aggregated"})
        for name, said in together.items():
            if has_form(name, said[0]):
                check_form(name, said)
        apart = await all_cases(client, {"x-kvmesh-placement": "disaggregated"})
        for name, said in apart.items():
            assert_same(name, said, together[name])
        await mesh.idle()
        moved = await after_a_move(mesh, client)
        for name, said in moved.items():
            assert_same(name, said, together[name])
        await mesh.idle()


async def after_a_move(mesh: Mesh, client: Client) -> dict[str, list[Said]]:
    """All cases again; the only decode worker is killed in the middle of every stream.

    A stream that was at its end before the kill, as on a busy machine, is begun again.
    """
    found: dict[str, list[Said]] = {}
    left = list(CASES)
    while True:
        begun: asyncio.Queue[str] = asyncio.Queue()
        streams = asyncio.create_task(all_cases(client, {}, begun, left))
        for _ in left:
            await begun.get()
        mesh["decode-0"].kill()
        said = await streams
        lost = {
            event["request_id"].partition("-")[0]
            for event in mesh["gateway"].events()
            if event["event"] == "request_lost_by_worker"
        }
        moved = [name for name in left if name in lost]
        assert moved
        found |= {name: said[name] for name in moved}
        left = [name for name in left if name not in lost]
        if not left:
            return found
        await mesh.restart("decode-0")
        await mesh.all_known()
