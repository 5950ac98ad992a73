"""Several choices of a call are admitted all or none, before the first byte of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import TWO_PAIRS, Stack, gateway_stack

TTFT_MS = 500
BODY: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "max_tokens": 200,
    "extra_headers": {"x-slo-ttft-ms": str(TTFT_MS)},
}
TWO_CHOICES: dict[str, Any] = {"prompt": "hello", "n": 2}
TWO_PROMPTS: dict[str, Any] = {"prompt": ["hello", "world"]}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, TWO_PAIRS) as stack:
        yield stack


async def texts_of(stack: Stack, **body: Any) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    async for chunk in await stack.client.completions.create(**BODY, **body):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def takes(stack: Stack, count: int) -> None:
    """All prefill workers together take so many prompts from now on, -1 for any number."""
    stack.mesh.workers["p1"].does.takes_offers = count
    stack.mesh.workers["p2"].does.takes_offers = min(count, 0)


@pytest.mark.parametrize("body", [TWO_CHOICES, TWO_PROMPTS])
async def test_a_choice_that_finds_nobody_refuses_them_all(
    stack: Stack, body: dict[str, Any]
) -> None:
    takes(stack, 1)
    with pytest.raises(openai.InternalServerError) as caught:
        await texts_of(stack, **body)
    response = caught.value.response
    assert response.status_code == 503
    assert response.headers["x-kvmesh-refusal"] == "prefill-busy"
    assert "retry-after" in response.headers
    await stack.idle()


@pytest.mark.parametrize("body", [TWO_CHOICES, TWO_PROMPTS])
async def test_who_was_taken_first_is_worked_on_and_waits(
    stack: Stack, body: dict[str, Any]
) -> None:
    takes(stack, 1)
    asking = asyncio.create_task(texts_of(stack, **body))
    workers = stack.mesh.workers
    await stack.mesh.until(lambda: workers["p1"].does.takes_offers == 0)
    await stack.mesh.until(lambda: not any(w.prefilling or w.running for w in workers.values()))
    takes(stack, -1)
    texts = await asking
    assert texts[0] == texts[1] != ""
    await stack.idle()


async def test_a_choice_that_is_lost_once_the_answer_has_begun_has_time_to_go_on(
    stack: Stack,
) -> None:
    loop, lost = asyncio.get_running_loop(), stack.mesh.workers["p2"]
    takes(stack, 1)
    stack.mesh.go.clear()
    lost.does.takes_offers, lost.does.first_waits = 1, True
    began = loop.time()
    asking = await stack.client.completions.create(**BODY, **TWO_CHOICES)
    await asking.__anext__()  # of the one at p1; it waits for the next
    assert len(lost.prefilling) == 1
    await lost.kill()
    await stack.mesh.until(lambda: loop.time() > began + 2 * TTFT_MS / 1000)
    takes(stack, -1)
    stack.mesh.go.set()
    ends = [choice.finish_reason async for chunk in asking for choice in chunk.choices]
    assert [end for end in ends if end] == ["stop", "stop"]
    await stack.idle()
