"""Streams of plain text: the same bytes, also when workers misbehave."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.api.answers import EventTemplate
from services.gateway.api.responses import Responses
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import TWO_PAIRS, Stack, gateway_stack

SAYS = "one request, one reservation, one handoff; no token is lost or repeated: 🙂 ü"
NEVER_SAID = "\0"
"""A stop string: with one, text may have to be held back."""


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        yield stack


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that went out in events in which nothing else differs, as they go."""
    seen: list[str] = []
    event = EventTemplate.event

    def noted(self: EventTemplate, text: str, id_line: str) -> bytes:
        seen.append(text)
        return event(self, text, id_line)

    monkeypatch.setattr(EventTemplate, "event", noted)
    return seen


async def _raw(stack: Stack, path: str, **body: Any) -> bytes:
    """The events of a stream, without what differs from call to call."""
    headers = {"x-request-id": "same"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/{path}", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        return re.sub(rb'"created":\d+', b"", await response.read())


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
TEXT = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 200}


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
@pytest.mark.parametrize("usage", [False, True])
async def test_the_bytes_are_those_of_bodies_made_one_by_one(
    stack: Stack,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    usage: bool,
) -> None:
    body = {**body, "stream_options": {"include_usage": usage}}
    from_template = await _raw(stack, path, **body)
    assert len(texts) > 10
    assert await _raw(stack, path, **body, stop=[NEVER_SAID]) == from_template
    texts.clear()
    monkeypatch.setattr(Responses, "is_answer", lambda *_: False)
    assert await _raw(stack, path, **body) == from_template
    assert texts == []
    await stack.idle()


@pytest.mark.parametrize("thinks", ["<think>well, well</think>\n\n", ""])
async def test_an_answer_is_plain_once_the_thinking_is_over(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, thinks: str
) -> None:
    template = "{{ messages[0].content }}{# </think> #}"
    async with gateway_stack(tmp_path, TWO_PAIRS, thinks + SAYS, template=template) as stack:
        from_template = await _raw(stack, "chat/completions", **CHAT)
        assert (b'"reasoning_content":' in from_template) == bool(thinks)
        assert not any("well" in text for text in texts)
        assert len(texts) > 10
        monkeypatch.setattr(Responses, "is_answer", lambda *_: False)
        assert await _raw(stack, "chat/completions", **CHAT) == from_template
        await stack.idle()


@pytest.mark.parametrize("trouble", ["break_decode_after", "fail_decode_after"])
async def test_a_stream_that_moves_goes_on_without_loss(stack: Stack, trouble: str) -> None:
    whole = await _raw(stack, "completions", **TEXT, stop=[NEVER_SAID])
    for worker in stack.mesh.workers.values():
        setattr(worker.does, trouble, 4)
    assert await _raw(stack, "completions", **TEXT) == whole
    await stack.idle()


async def test_repeated_tokens_are_sent_once(stack: Stack) -> None:
    whole = await _raw(stack, "completions", **TEXT, stop=[NEVER_SAID])
    for worker in stack.mesh.workers.values():
        worker.does.repeat_tokens = True
    assert await _raw(stack, "completions", **TEXT) == whole
    await stack.idle()


async def test_a_stall_is_noticed_after_tokens(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"stall_s": 0.2}) as stack:
        whole = await _raw(stack, "completions", **TEXT, stop=[NEVER_SAID])
        for worker in stack.mesh.workers.values():
            worker.does.stall_decode_after = 4
        assert await _raw(stack, "completions", **TEXT) == whole
        moves = stack.gateway.metrics.value("kvmesh_gateway_moves_total", reason="decode_stalled")
        assert moves >= 1
        await stack.idle()


async def test_tokens_are_progress(tmp_path: Path, texts: list[str]) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"stall_s": 1.0}) as stack:
        opened = asyncio.Event()

        def has_seen(count: int) -> bool:
            return len(texts) >= count

        stack.mesh.go = opened

        async def slowly() -> None:
            for seen in range(1, 1000):
                opened.set()
                await stack.mesh.until(functools.partial(has_seen, seen))
                opened.clear()
                await asyncio.sleep(0.2)  # shorter than a stall, all together longer

        pace = asyncio.create_task(slowly())
        await _raw(stack, "completions", **{**TEXT, "max_tokens": 12})
        pace.cancel()
        assert len(texts) >= 3
        moves = stack.gateway.metrics.value("kvmesh_gateway_moves_total", reason="decode_stalled")
        assert moves == 0
        await stack.idle()


async def test_a_client_that_leaves_cancels_the_work(stack: Stack, texts: list[str]) -> None:
    stack.says(SAYS * 200)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/completions", json={**TEXT, "max_tokens": 400}) as response,
    ):
        await stack.mesh.until(lambda: bool(texts))
        response.close()
    await stack.idle()
