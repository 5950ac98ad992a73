"""Requests that could not be served in time are refused when they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvmesh.policy.crowd import MIN_WAITING, Crowd
from kvmesh.policy.groups import GroupKey
from services.gateway.tenants.access import KeyRing
from tests.integration.gateway_fake_worker import LAYOUT, MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

CALLER = KeyRing().check("Bearer key").name
"""What the stack's client is counted under."""

PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path) as stack:
        yield stack


def _only_crowd(stack: Stack) -> Crowd:
    """Of the one group that the fake mesh has."""
    fingerprint = LAYOUT.model_fingerprint
    return stack.gateway.lanes.of(GroupKey(MODEL, fingerprint, "", "")).crowd


def _crowd(stack: Stack, interval_s: float) -> None:
    """Many requests wait, and one is served each `interval_s`."""
    crowd = _only_crowd(stack)
    for _ in range(2 * MIN_WAITING):
        crowd.enter(CALLER)
    for number in range(64):
        crowd.leave(CALLER, number * interval_s, placed=True)
        crowd.enter(CALLER)


def _disperse(stack: Stack) -> None:
    crowd = _only_crowd(stack)
    for _ in range(2 * MIN_WAITING):
        crowd.leave(CALLER, 0.0, placed=False)


async def test_a_queue_longer_than_the_patience_refuses_at_once(stack: Stack) -> None:
    _crowd(stack, 1.0)
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.client.completions.create(**PROMPT)
    response = caught.value.response
    assert response.status_code == 503
    assert response.headers["x-kvmesh-refusal"] == "gateway-busy"
    assert int(response.headers["retry-after"]) >= 2 * MIN_WAITING - 1
    assert stack.mesh.queries == []  # nobody was asked for it
    _disperse(stack)
    await stack.client.completions.create(**PROMPT)
    await stack.idle()


async def test_who_has_the_patience_or_priority_waits(stack: Stack) -> None:
    _crowd(stack, 1.0)
    await stack.client.completions.create(
        **PROMPT, extra_headers={"x-slo-ttft-ms": str(4 * MIN_WAITING * 1000)}
    )
    await stack.client.completions.create(**PROMPT, extra_body={"priority": -1})
    _disperse(stack)
    await stack.idle()


async def test_a_gateway_that_is_late_refuses_until_it_is_not(stack: Stack) -> None:
    stack.gateway.lanes.lag.note(1e6)
    with pytest.raises(openai.InternalServerError):
        await stack.client.completions.create(**PROMPT)
    while stack.gateway.lanes.lag.now_s > 1:  # it measures itself all the time
        await asyncio.sleep(0)
    await stack.client.completions.create(**PROMPT)
    await stack.idle()
