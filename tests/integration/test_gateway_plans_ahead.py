"""Requests that find a plan made before they came do not ask, and end as others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.policy import plans_ahead
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import TWO_PAIRS, Stack, gateway_stack

PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


@pytest.fixture
async def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """A stack with plans for many requests; they do not grow old, however slow the machine is."""
    monkeypatch.setattr(plans_ahead, "AHEAD_S", 1000.0)
    async with gateway_stack(tmp_path, TWO_PAIRS) as stack:
        stack.mesh.plans_ahead = True
        while len(stack.gateway.plans) <= plans_ahead.MAX_AHEAD // 8:
            await asyncio.gather(*(ask(stack) for _ in range(8)))
        await stack.idle()
        yield stack


async def ask(stack: Stack) -> str:
    answer = await stack.client.completions.create(**PROMPT)
    return str(answer.choices[0].text)


async def test_who_finds_a_plan_does_not_ask_and_is_told_of_later(stack: Stack) -> None:
    asked, planned = len(stack.mesh.queries), len(stack.gateway.plans)
    assert await ask(stack)
    assert (len(stack.mesh.queries), len(stack.gateway.plans)) == (asked, planned - 1)
    while len(stack.mesh.queries) == asked:
        assert await ask(stack)
    assert stack.mesh.num_used_ahead > 0
    await stack.idle()


async def test_a_refusal_voids_what_was_planned(stack: Stack) -> None:
    first = next(iter(stack.mesh.workers.values()))
    first.does.reject_offers = 1
    assert await ask(stack)
    assert first.does.reject_offers == 0
    assert len(stack.gateway.plans) == 0
    await stack.idle()


async def test_a_departure_does_too(stack: Stack) -> None:
    seen = stack.mesh.fleet_seen
    gone = stack.mesh.workers.pop("d2")
    stack.mesh.changed.set()
    await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)
    await stack.mesh.until(lambda: len(stack.gateway.plans) == 0)
    assert await ask(stack)
    await stack.idle()
    await gone.kill()
