"""Requests that one worker does answer as all others, whatever happens to them."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.core.types import Placement, RefusalReason
from services.gateway.request import record as request_record
from services.gateway.request.life import Life
from tests.integration.gateway_fake_worker import MODEL, Behaviour
from tests.integration.gateway_stack import CHAT, TWO_PAIRS, Stack, gateway_stack, noted_asks

SAYS = "one plan, one worker, one message: 🙂 ü"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that a worker was asked to do, each time it was."""
    return noted_asks(monkeypatch, lambda reserve: str(reserve.request_id))


@pytest.fixture
def stall_s() -> float:
    """Longer than a busy machine pauses; tests of stalls have a shorter one."""
    return 30.0


@pytest.fixture
async def stack(tmp_path: Path, asked: list[str], stall_s: float) -> AsyncIterator[Stack]:
    """Plans name one worker."""
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"stall_s": stall_s}) as stack:
        stack.mesh.placement = Placement.AGGREGATED
        yield stack


async def ask(stack: Stack, *, stream: bool) -> str:
    """The whole text of an answer."""
    if not stream:
        answer = await stack.client.chat.completions.create(**CHAT)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(stack.mesh.output) + 1
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""
    chunks = await stack.client.chat.completions.create(**CHAT, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def _raw(stack: Stack, body: dict[str, Any]) -> bytes:
    """The events of a stream, without what differs from call to call."""
    headers = {"x-request-id": "same"}
    path = "chat/completions" if "messages" in body else "completions"
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post(f"/v1/{path}", json=body, headers=headers) as response,
    ):
        assert "x-kvmesh-decode-worker" in response.headers
        return re.sub(rb'"created":\d+', b"", await response.read())


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_counted_once(stack: Stack, asked: list[str], stream: bool) -> None:
    metrics = stack.gateway.metrics
    names = (
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "kvmesh_gateway_prefill_offers_count",
    )
    assert await ask(stack, stream=stream) == SAYS
    await stack.idle()
    assert len(asked) == len(stack.mesh.queries) == 1
    counted = [metrics.value(name, model_name=MODEL) for name in names]
    assert counted == [len(stack.mesh.output) + 1, 1, 1, 1]


USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("says", [SAYS, f"🙂 {SAYS}"])  # part of a character is no text yet
async def test_a_stream_is_the_same_where_text_may_have_to_be_held_back(
    stack: Stack, says: str
) -> None:
    stack.says(says)
    text: dict[str, Any] = {"model": MODEL, "prompt": [5] * 9, "max_tokens": 200}
    for call in (CHAT, CHAT | USAGE, text, text | USAGE, text | {"echo": True}):
        bodies = [
            await _raw(stack, {**call, "stream": True, **more}) for more in ({}, {"stop": ["\0"]})
        ]
        assert bodies[0] == bodies[1]
        await stack.idle()


@pytest.mark.parametrize("stall_s", [1.0])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_goes_wrong_goes_on(stack: Stack, stream: bool) -> None:
    for trouble in (
        {"reject_offers": 1},
        {"refuse_reserves": 1},
        {"fail_prefills": 1},
        {"fail_decode_after": 3},
        {"stall_decode_after": 3},
        {"repeat_tokens": True},
        {"tokens_per_message": 5},
        {"decode_first": True},
        {"starts": False},
    ):
        for worker in stack.mesh.workers.values():
            worker.does = Behaviour(**trouble)
        assert await ask(stack, stream=stream) == SAYS, trouble
        await stack.idle()
    moves = {
        reason: stack.gateway.metrics.value("kvmesh_gateway_moves_total", reason=reason)
        for reason in ("prefill_failed", "decode_failed", "decode_stalled")
    }
    assert min(moves.values()) >= 1
    refusals = stack.gateway.metrics.refusals()
    assert refusals["prefill", RefusalReason.BUSY.value] >= 1
    assert refusals["decode", RefusalReason.NO_SLOTS.value] >= 1


async def test_a_broken_stream_moves_too(stack: Stack) -> None:
    for worker in stack.mesh.workers.values():
        worker.does.break_decode_after = 3
    assert await ask(stack, stream=True) == SAYS
    await stack.idle()


async def test_who_lost_a_request_is_not_asked_again(stack: Stack, asked: list[str]) -> None:
    stack.mesh.workers["p1"].does.fail_decode_after = 3
    assert await ask(stack, stream=True) == SAYS
    (request_id,) = set(asked)
    started = {name: each.started for name, each in stack.mesh.workers.items()}
    assert (request_id, 1) in started["p1"]
    assert (request_id, 2) in started["p2"]
    await stack.idle()


@pytest.mark.parametrize("stall_s", [1.0])
async def test_a_stall_after_a_long_prefill_is_noticed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    look = Life._tick

    def looks(self: Life) -> None:
        look(self)
        looked.set()

    monkeypatch.setattr(Life, "_tick", looks)
    stack.mesh.workers["p1"].does = Behaviour(first_waits=True, stall_decode_after=3)
    stack.mesh.go.clear()
    asking = asyncio.ensure_future(ask(stack, stream=True))
    await looked.wait()  # while it waits for the prefill, which may take a minute
    stack.mesh.go.set()
    async with asyncio.timeout(30):
        assert await asking == SAYS
    await stack.idle()


async def test_an_event_of_a_newer_worker_loses_its_own_request_alone(
    stack: Stack,
) -> None:
    stack.mesh.workers["p1"].does.new_finish_after = 3
    assert await ask(stack, stream=True) == SAYS
    assert stack.gateway.sessions.num_connected == len(TWO_PAIRS)
    assert stack.gateway.metrics.value("kvmesh_gateway_moves_total", reason="decode_failed") == 1
    await stack.idle()


async def test_a_whole_answer_that_nobody_waits_for_is_charged(
    stack: Stack,
) -> None:
    stack.says("many tokens that come before the client leaves " * 3)
    used = functools.partial(stack.gateway.metrics.value, "kvmesh_gateway_tenant_tokens_total")
    made = functools.partial(
        stack.gateway.metrics.value, "vllm:generation_tokens_total", model_name=MODEL
    )
    used_before, made_before = used(tenant=""), made()
    stack.mesh.workers["p1"].does.stall_decode_after = 30
    asking = asyncio.ensure_future(ask(stack, stream=False))
    await stack.mesh.until(lambda: made() > made_before)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await stack.idle()
    num_made = made() - made_before
    assert num_made > 16
    assert used(tenant="") - used_before > num_made  # and the prompt


async def test_a_client_that_leaves_ends_the_work(stack: Stack, asked: list[str]) -> None:
    stack.mesh.go.clear()  # no token after the first
    asking = asyncio.ensure_future(ask(stack, stream=True))
    await stack.mesh.until(lambda: stack.mesh.num_open > 0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await stack.idle()
    (request_id,) = asked
    assert any((request_id, 1) in worker.cancels for worker in stack.mesh.workers.values())
    stack.mesh.go.set()


async def test_the_log_says_where_a_stream_ran_that_its_client_left(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    log = SimpleNamespace(tells_info=True, info=lambda _, **fields: told.append(fields))
    monkeypatch.setattr(request_record, "log", log)
    for worker in stack.mesh.workers.values():
        worker.does.stall_decode_after = 2
    chunks = await stack.client.chat.completions.create(**CHAT, stream=True)
    async for chunk in chunks:
        if chunk.choices[0].delta.content:
            break
    await chunks.close()
    await stack.mesh.until(lambda: bool(told))
    await stack.idle()
    (line,) = told
    assert (line["finish_reason"], line["placement"]) == ("cancelled", "aggregated")
    assert line["prefill_worker"] == line["decode_worker"]
    assert line["prefill_worker"] in stack.mesh.workers


async def test_a_request_runs_no_longer_than_it_may(
    tmp_path: Path,
) -> None:
    limits = {"request_timeout_s": 2.0}
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits=limits) as stack:
        stack.mesh.placement = Placement.AGGREGATED
        stack.mesh.go.clear()  # no token after the first
        asked = (ask(stack, stream=False), ask(stack, stream=True))
        late, cut = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(late, openai.APIStatusError)
        assert late.status_code == 504
        # The head went out with the first token: what ends the stream is an event.
        assert isinstance(cut, openai.APIError)
        assert not isinstance(cut, openai.APIStatusError)
        assert "longer than" in str(cut)
        stack.mesh.go.set()
        await stack.idle()
