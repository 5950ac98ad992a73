"""The control plane dies: requests go on, and what it knew comes back."""

from __future__ import annotations

import json
import random
import secrets
import signal

import pytest

from tests.chaos.load import a_prompt, under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import BLOCK_SIZE, Mesh
from tests.waiting import until


async def route_knows_prefix(mesh: Mesh, client: ApiClient, prompt: list[int]) -> bool:
    """Whether the scheduler sends a prompt that was served before to where its blocks are."""
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"}
    answer = await client.complete(prompt, headers=headers, max_tokens=1)
    assert answer.ok, answer.error
    cached = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    lines = (mesh.folder / "scheduler.jsonl").read_text().splitlines()
    spans = [json.loads(line) for line in lines]
    routes = [span["attributes"] for span in spans if span["trace_id"] == trace_id]
    if not routes:
        return False  # the gateway has not found its way back to the scheduler yet
    promised = f"with {cached} of {len(prompt)} tokens cached"
    known = routes[-1]["cache_known"] and promised in routes[-1]["reason"]
    return known and answer.cached_tokens == cached


async def knowledge_is_back(mesh: Mesh, client: ApiClient, old_prompt: list[int]) -> None:
    """Waits until what was cached before and what is cached now is known."""
    await until(lambda: route_knows_prefix(mesh, client, old_prompt), "the old prefix is known")
    new_prompt = a_prompt(random.Random("new"), 301, 302)
    await client.complete(new_prompt, max_tokens=40)
    await until(lambda: route_knows_prefix(mesh, client, new_prompt), "a new prefix is known")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("scheduler", signal.SIGKILL),
        pytest.param("scheduler", signal.SIGTERM, marks=pytest.mark.long),
        ("kvmanager", signal.SIGKILL),
    ],
)
async def test_requests_do_not_notice_a_lost_control_service(
    mesh: Mesh, client: ApiClient, name: str, how: signal.Signals
) -> None:
    before = a_prompt(random.Random("before"), 299, 300)
    await client.complete(before, max_tokens=40)
    await until(lambda: route_knows_prefix(mesh, client, before), "the prefix is known")
    async with under_load(client) as load:
        mesh[name].signal(how)
        assert await mesh[name].exit_code() == (0 if how == signal.SIGTERM else -how)
        await load.more(12)
        await mesh.restart(name)
        restored = mesh[name].event("fleet_restored")
        assert (restored and restored["num_workers"]) == (4 if name == "scheduler" else None)
        await load.more(12)
        await mesh.all_known()
        await load.more(6)
    load.check_all_ok()
    await knowledge_is_back(mesh, client, before)
    await mesh.idle()


async def test_both_gone_at_once_and_a_worker_restarts_meanwhile(
    mesh: Mesh, client: ApiClient
) -> None:
    async with under_load(client, num_clients=4) as load:
        mesh["scheduler"].kill()
        mesh["kvmanager"].kill()
        mesh["prefill-1"].kill()
        await load.more(8)
        await mesh.restart("prefill-1")
        await mesh.restart("kvmanager")
        await mesh.restart("scheduler")
        await mesh.all_known()
        await load.more(8)
    load.check_all_ok()
    await mesh.idle()


async def test_redis_comes_back_empty_under_load(mesh: Mesh, client: ApiClient) -> None:
    before = a_prompt(random.Random("before"), 299, 300)
    await client.complete(before, max_tokens=40)
    await until(lambda: route_knows_prefix(mesh, client, before), "the prefix is known")
    assert mesh.redis is not None
    async with under_load(client) as load:
        mesh.redis.stop(kill=True)
        await load.more(18)
        assert mesh["kvmanager"].event("store_down") is not None
        mesh.redis.start()
        await load.more(6)

    async def store_is_up() -> bool:
        metrics = await mesh["kvmanager"].metrics()
        return metrics.value("kvmesh_kvmanager_redis_up") == 1

    load.check_all_ok()
    await until(store_is_up, "the kvmanager reached the new Redis")
    await knowledge_is_back(mesh, client, before)
    await mesh.idle()
