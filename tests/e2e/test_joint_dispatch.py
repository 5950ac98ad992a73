"""Requests that come together, in real processes: each goes where its prefix is, nothing moves."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.api_client import ApiClient, placed
from tests.mesh_processes import BLOCK_SIZE, VOCAB_SIZE, Flags, Mesh, fake_tokens, running_mesh

PREFIX = 40 * BLOCK_SIZE
TAIL = 8 * BLOCK_SIZE
FLAGS: dict[str, Flags] = {
    "scheduler": {
        "routing.policy": "joint",
        "routing.joint-window-ms": 200,
        "routing.aggregate-tokens": 0,
        "planning.roles": "off",
        "server.admin.port": 0,
        "kvmanager.timeout-s": 5.0,
    },
    "gateway": {"scheduler.route-timeout-s": 10.0},
    # Long enough for the next request to find a worker at work.
    "prefill": {"engine.fake-step-s": 0.05},
}
ELASTIC: dict[str, Flags] = {
    "scheduler": {**FLAGS["scheduler"], "routing.policy": "tokenlake"},
    "gateway": FLAGS["gateway"],
}
LONG = 256 * BLOCK_SIZE


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


async def decisions(mesh: Mesh) -> list[dict[str, Any]]:
    url = f"http://{mesh['scheduler'].address_of('admin_serving')}/debug/decisions"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        routes: list[dict[str, Any]] = (await response.json())["routes"]
        return routes


async def apart(client: ApiClient, seeds: Iterator[int]) -> dict[str, list[int]]:
    """New prefixes by the prefill worker that holds them, one for each worker."""
    while True:
        prompts = [tokens(PREFIX, next(seeds)) for _ in range(2)]
        answers = await asyncio.gather(*(client.complete(each, max_tokens=2) for each in prompts))
        held = {
            answer.headers["x-kvmesh-prefill-worker"]: prompt
            for answer, prompt in zip(answers, prompts, strict=True)
        }
        if len(held) == 2:
            return held


def is_meant(decision: dict[str, Any]) -> bool:
    """It was made for two, over idle workers of which one is known to hold the prefix."""
    prefill = decision["prefill"]
    return (
        decision["num_asked"] == 2
        and all(each["pending_tokens"] == each["prefill_used"] == 0 for each in prefill)
        # Whoever has the other one's prompt to compute is later, and not asked.
        and max(each["cached_tokens"] for each in prefill) == PREFIX
    )


async def test_prompts_that_come_together_go_where_their_prefixes_are(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, 2, 1, flags=FLAGS) as mesh, ApiClient(mesh.url) as client:
        seeds = itertools.count()
        # Which requests meet, and what is published by then, is chance; those that do count.
        while True:
            held = await apart(client, seeds)
            await mesh.idle()
            turns = {
                name: prefix + tokens(TAIL, next(seeds))
                for name, prefix in sorted(held.items(), reverse=True)
            }
            answers = await asyncio.gather(
                *(client.complete(turn, max_tokens=3) for turn in turns.values())
            )
            for turn, answer in zip(turns.values(), answers, strict=True):
                assert answer.token_ids == fake_tokens(turn, 3)
            newest = (await decisions(mesh))[:2]
            if all(map(is_meant, newest)):
                break
        assert [each.headers["x-kvmesh-prefill-worker"] for each in answers] == list(turns)
        assert [each["joint_reason"] for each in newest] == ["kept", "kept"]
        assert {each["reason"] for each in newest} == {"prefix"}
        for each in newest:
            assert each["prefill"][0]["cached_tokens"] == PREFIX
            assert each["prefill"][0]["source"] == ""
        scheduler = await mesh["scheduler"].metrics()
        assert scheduler.value("kvmesh_scheduler_joint_requests_total", reason="kept") >= 2
        await mesh.idle()


def finds_all_idle(decision: dict[str, Any]) -> bool:
    """It was made for two, when nobody had a prompt."""
    prefill = decision["prefill"]
    return decision["num_asked"] == 2 and not any(each["prefill_used"] for each in prefill)


@pytest.mark.long
async def test_long_prompts_that_come_together_share_idle_workers(tmp_path: Path) -> None:
    """TokenLake's program gives two of three workers to one of them. Layers are a real model's."""
    async with (
        running_mesh(tmp_path, 3, 1, engine="kvmesh", flags=ELASTIC) as mesh,
        ApiClient(mesh.url) as client,
    ):
        seeds = itertools.count(100)
        while True:
            prompts = [tokens(LONG, next(seeds)) for _ in range(2)]
            answers = await asyncio.gather(
                *(client.complete(each, max_tokens=3) for each in prompts)
            )
            await mesh.idle()
            newest = (await decisions(mesh))[:2]
            if all(map(finds_all_idle, newest)):
                break
        assert sorted(each["degree"] for each in newest) == [1, 2]
        # Which of the two depends on how fast this machine is.
        assert {each["elastic_reason"] for each in newest} <= {"within_slo", "best_effort"}
        assert {each["num_batched"] for each in newest} == {1}
        reasons = sorted(each.headers["x-kvmesh-decision"].split(";")[0] for each in answers)
        assert reasons == ["chain", "load"]
        for prompt, answer in zip(prompts, answers, strict=True):
            again = await client.complete(
                prompt, max_tokens=3, cache_salt="another", headers=placed("aggregated")
            )
            assert again.token_ids == answer.token_ids
        await mesh.idle()
