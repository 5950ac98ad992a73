"""A client that goes away frees everything it used, wherever its request is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.api_client import ApiClient, placed
from tests.mesh_child import scrape
from tests.mesh_processes import Mesh, fake_tokens
from tests.waiting import until


async def num_aborted(mesh: Mesh) -> float:
    metrics = await scrape(f"{mesh.url}/metrics")
    return metrics.value("vllm:request_success_total", finished_reason="abort")


async def is_running(mesh: Mesh) -> bool:
    fleet = [await worker.metrics() for worker in mesh.workers]
    return any(each.value("vllm:kv_cache_usage_perc") for each in fleet)


@pytest.mark.parametrize("where", ["disaggregated", "aggregated"])
async def test_a_client_that_leaves_in_mid_stream(
    fake_mesh: Mesh, fake_client: ApiClient, where: str
) -> None:
    before = await num_aborted(fake_mesh)
    prompts = [list(range(10 + i, 110 + i)) for i in range(4)]
    for prompt in prompts:
        async with fake_client.stream(prompt, headers=placed(where), max_tokens=4000) as stream:
            await stream.read(3)
            assert stream.answer.token_ids[:3] == fake_tokens(prompt, 3)
            assert await is_running(fake_mesh)
    await fake_mesh.idle()

    async def all_counted() -> bool:
        return await num_aborted(fake_mesh) - before == len(prompts)

    await until(all_counted, "all are counted as aborted")


async def test_clients_that_leave_before_their_first_token(
    fake_mesh: Mesh, fake_client: ApiClient
) -> None:
    # Four chunks each, far more prompts than slots: some are in prefill, the others still wait.
    asking = [
        asyncio.create_task(fake_client.complete([i + 5] * 2000, max_tokens=4000))
        for i in range(12)
    ]
    await until(lambda: is_running(fake_mesh), "someone is at work")
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await fake_mesh.idle()
    answer = await fake_client.complete([7] * 100, max_tokens=4)
    assert answer.token_ids == fake_tokens([7] * 100, 4)


async def test_one_choice_that_stops_early_does_not_disturb_the_others(
    fake_mesh: Mesh, fake_client: ApiClient
) -> None:
    body: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 30}
    prompt = list(range(50, 150))
    expected = [fake_tokens(prompt, 30, temperature=1.0, seed=3 + i) for i in range(3)]
    stop = expected[0][4]
    answer = await fake_client.complete(prompt, stop_token_ids=[stop], **body)
    assert answer.choices[0].finish_reason == "stop"
    for number in (1, 2):
        assert answer.choices[number].token_ids == expected[number]
    await fake_mesh.idle()
