"""The default policy in real processes: where requests go, why, and roles that follow the load."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.api_client import ApiClient, placed
from tests.mesh_processes import BLOCK_SIZE, VOCAB_SIZE, Flags, Mesh, fake_tokens, running_mesh
from tests.waiting import until

SHORT = 64


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


async def decisions(mesh: Mesh, **asked: str) -> dict[str, Any]:
    url = f"http://{mesh['scheduler'].address_of('admin_serving')}/debug/decisions"
    async with aiohttp.ClientSession() as session, session.get(url, params=asked) as response:
        assert response.status == 200
        body: dict[str, Any] = await response.json()
        return body


async def test_short_prompts_stay_with_their_decode_worker_and_it_is_said_why(
    tmp_path: Path,
) -> None:
    flags: dict[str, Flags] = {
        "scheduler": {
            "routing.aggregate-tokens": SHORT,
            "server.admin.port": 0,
            # A plan waits for what is cached, also where everything is slow.
            "kvmanager.timeout-s": 5.0,
        },
        "gateway": {"scheduler.route-timeout-s": 10.0},
    }
    async with running_mesh(tmp_path, 1, 2, flags=flags) as mesh, ApiClient(mesh.url) as client:
        opening = tokens(60 * BLOCK_SIZE, 1)
        headers = {"x-request-id": "first"}
        first = await client.complete(opening, headers=headers, max_tokens=40)
        assert first.headers["x-kvmesh-placement"] == "disaggregated"
        decode = first.decode_worker
        assert first.headers["x-kvmesh-decision"] == f"load; prefill=prefill-0; decode={decode}"
        await mesh.idle()

        async def both_hold_the_opening() -> bool:
            known = await mesh["kvmanager"].metrics()
            # The decode worker has two more, of what it generated.
            return known.value("kvmesh_kvmanager_blocks") >= 2 * 60 + 2

        await until(both_hold_the_opening, "prefill and decode worker publish their blocks")
        # The next turn: a thousand tokens, of which the decode worker has all but a few.
        turn = opening + first.token_ids + tokens(SHORT - 2 * BLOCK_SIZE, 2)
        headers = {"x-request-id": "second"}
        second = await client.complete(turn, headers=headers, max_tokens=8)
        assert second.headers["x-kvmesh-placement"] == "aggregated"
        assert second.token_ids == fake_tokens(turn, 8)
        decision = f"short_prompt; prefill={decode}; decode={decode}"
        assert second.headers["x-kvmesh-decision"] == decision
        assert second.usage["prompt_tokens_details"]["cached_tokens"] >= 61 * BLOCK_SIZE

        kept = (await decisions(mesh))["routes"]
        assert [each["reason"] for each in kept] == ["short_prompt", "load"]
        assert kept[0]["prefill"][0]["worker_id"] == decode
        assert kept[0]["prefill"][0]["cached_tokens"] >= 61 * BLOCK_SIZE
        assert kept[1]["prefill"][0]["worker_id"] == "prefill-0"
        assert {each["worker_id"] for each in kept[1]["decode"]} == {"decode-0", "decode-1"}
        request_id = kept[1]["request_id"]
        assert (await decisions(mesh, request=request_id))["routes"][0]["reason"] == "load"
        await mesh.idle()


async def prefill_workers(mesh: Mesh) -> float:
    return (await mesh["scheduler"].metrics()).value("kvmesh_scheduler_workers", role="prefill")


@pytest.mark.slow
async def test_an_idle_decode_worker_helps_and_returns(tmp_path: Path) -> None:
    """FlowKV's role switch: no process restarts, no request is lost, and nothing is left over."""
    flags: dict[str, Flags] = {
        "scheduler": {"planning.roles": "apply", "server.admin.port": 0},
        "prefill": {"engine.fake-step-s": 0.2},
        "decode": {"engine.fake-step-s": 0.001},
        "gateway": {"limits.ttft-deadline-ms": 60000},
    }
    async with running_mesh(tmp_path, 2, 2, flags=flags) as mesh, ApiClient(mesh.url) as client:
        seeds = iter(range(10**6))
        stop = asyncio.Event()

        async def user() -> int:
            served = 0
            while not stop.is_set():
                prompt = tokens(400, next(seeds))
                answer = await client.streamed(prompt, max_tokens=2)
                assert answer.token_ids == fake_tokens(prompt, 2)
                served += 1
            return served

        async def roles_are(count: int) -> None:
            async def fact() -> bool:
                return await prefill_workers(mesh) == count

            await until(fact, f"{count} workers prefill", 30)

        async with asyncio.TaskGroup() as users:
            running = [users.create_task(user()) for _ in range(8)]
            with contextlib.ExitStack() as stack:
                stack.callback(stop.set)
                await roles_are(3)
        assert all(each.result() > 0 for each in running)
        await roles_are(2)
        await mesh.idle()
        changes = [e for e in (await decisions(mesh))["fleet"] if e["kind"] == "switch"]
        assert changes[-1]["reason"] == "helps_prefill"
        assert changes[0]["role"] == "decode"
        assert {each["outcome"] for each in changes} == {"applied"}
        lives = {name: child.lives for name, child in mesh.children.items()}
        assert set(lives.values()) == {1}


async def test_idle_prefill_workers_compute_a_long_prompt_together(tmp_path: Path) -> None:
    """Of a real model: its layers are what a chain needs."""
    flags: dict[str, Flags] = {
        "scheduler": {"server.admin.port": 0, "kvmanager.timeout-s": 5.0},
        "gateway": {"scheduler.route-timeout-s": 10.0},
    }
    prompt = tokens(256 * BLOCK_SIZE, 5)
    async with (
        running_mesh(tmp_path, 2, 1, engine="kvmesh", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        found = await client.complete(prompt, max_tokens=8)
        assert found.headers["x-kvmesh-decision"].startswith("chain; prefill=prefill-")
        assert found.headers["x-kvmesh-placement"] == "disaggregated"
        (kept,) = (await decisions(mesh))["routes"]
        chosen, other = kept["prefill"]
        assert (kept["reason"], chosen["fetch"]) == ("chain", "chain")
        assert chosen["source"] == other["worker_id"]
        last = await mesh[chosen["worker_id"]].metrics()
        assert last.value("kvmesh_prompt_parts_total", outcome="came") == 1
        await mesh.idle()
        # Another tenant's cache holds nothing of it.
        apart = placed("aggregated")
        alone = await client.complete(prompt, max_tokens=8, cache_salt="another", headers=apart)
        assert alone.token_ids == found.token_ids
        await mesh.idle()
