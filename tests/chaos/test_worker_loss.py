"""SIGKILL of workers: work moves, no token is lost or repeated, nothing stays held."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.chaos.load import a_prompt, under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Mesh, fake_tokens
from tests.waiting import until


async def test_a_killed_prefill_worker_costs_a_retry(mesh: Mesh, client: ApiClient) -> None:
    async with under_load(client) as load:
        mesh["prefill-0"].kill()
        await load.more(12)
    load.check_all_ok()
    await mesh.idle()


# Tokens that are drawn show all that the greatest logits would, and that the noise is the same.
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
async def test_a_stream_whose_decode_worker_is_killed_goes_on_elsewhere(
    mesh: Mesh, client: ApiClient, temperature: float
) -> None:
    prompt = list(range(10, 60))
    expected = fake_tokens(prompt, 120, temperature=temperature, seed=5)
    body: dict[str, Any] = {"max_tokens": 120, "temperature": temperature, "seed": 5}
    async with client.stream(prompt, **body) as stream:
        await stream.read(20)
        mesh[stream.answer.decode_worker].kill()
        answer = await stream.finish()
    assert answer.token_ids == expected
    assert answer.only.finish_reason == "length"
    assert answer.usage["completion_tokens"] == 120
    assert mesh["gateway"].event("request_lost_by_worker") is not None
    await mesh.idle()


async def test_many_streams_move_at_once(mesh: Mesh, client: ApiClient) -> None:
    async with under_load(client, num_clients=8, max_tokens=40) as load:
        mesh["decode-1"].kill()
        await load.more(16)
    load.check_all_ok()
    await mesh.idle()


@pytest.mark.slow
async def test_prefill_workers_killed_in_a_loop(mesh: Mesh, client: ApiClient) -> None:
    async with under_load(client, num_clients=8) as load:
        for number in range(5):
            name = f"prefill-{number % 2}"
            mesh[name].kill()
            await load.more(4)
            await mesh.restart(name)
            await load.more(4)
    load.check_tokens()
    refused = [answer for _, _, answer in load.answers if not answer.ok]
    for answer in refused:
        assert answer.status == 503, answer.error
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.error is not None
        assert answer.error["code"]
    assert len(refused) < len(load.answers) / 4
    await mesh.all_known()
    await mesh.idle()


async def test_all_decode_workers_gone_and_back(mesh: Mesh, client: ApiClient) -> None:
    prompt = a_prompt(random.Random(1))
    expected = fake_tokens(prompt, 10)
    for name in ("decode-0", "decode-1"):
        mesh[name].kill()

    async def not_ready() -> bool:
        return not await mesh.is_ready()

    await until(not_ready, "the gateway says that it is not ready")
    headers = {"x-slo-ttft-ms": "700", "x-kvmesh-placement": "disaggregated"}
    answers = await asyncio.gather(
        *(client.complete(prompt, headers=headers, max_tokens=10) for _ in range(4))
    )
    for answer in answers:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["x-kvmesh-refusal"]
        assert answer.error is not None
        assert answer.waited_s < 4 * 0.7
    for name in ("decode-0", "decode-1"):
        await mesh.restart(name)
    await until(mesh.is_ready, "the gateway is ready again by itself")
    answer = await client.complete(prompt, max_tokens=10)
    assert answer.token_ids == expected
    await mesh.all_known()
    await mesh.idle()
