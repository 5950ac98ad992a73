"""Workers that leave, die or hang at a named point of one request."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvmesh.rpc.channels import open_channel
from tests.e2e.api_client import ApiClient, placed
from tests.mesh_child import Child, scrape
from tests.mesh_processes import Mesh, fake_tokens, running_mesh
from tests.waiting import until

APART = placed("disaggregated")
PROMPT = [3 + i % 4000 for i in range(3000)]
"""Six chunks."""

SLOW = {
    "prefill": {"engine.fake-step-s": 0.25},
    "decode": {"engine.fake-step-s": 0.01, "worker.stall-s": 1.0},
    "gateway": {"limits.stall-s": 1.0, "limits.prefill-timeout-s": 3.0},
    "scheduler": {"fleet.lease-s": 1.5},
}


async def holder(mesh: Mesh, service: str) -> Child:
    """Waits until a worker of that kind holds the request, and says which."""
    gauge = {"prefill": "kvmesh_prefill_slots_used", "decode": "kvmesh_decode_reservations_open"}

    found: list[Child] = []

    async def someone_holds() -> bool:
        for worker in mesh.workers:
            held = (await worker.metrics()).value(gauge[service])
            found.extend([worker] if held and worker.service == service else [])
        return bool(found)

    await until(someone_holds, f"a {service} worker holds the request")
    return found[0]


async def health(child: Child) -> int:
    """What the gRPC health service says."""
    async with open_channel(child.address) as channel:
        stub: Any = HealthStub(channel)
        answer = await stub.Check(HealthCheckRequest(), timeout=5)
    return int(answer.status)


def spare(service: str) -> tuple[int, int]:
    """Prefill and decode workers, two of the kind that is to fail."""
    return (2, 1) if service == "prefill" else (1, 2)


@pytest.mark.parametrize("service", ["prefill", "decode"])
async def test_a_worker_that_drains_finishes_what_it_took(tmp_path: Path, service: str) -> None:
    async with (
        running_mesh(tmp_path, *spare(service), flags=SLOW) as mesh,
        ApiClient(mesh.url) as client,
    ):
        asking = asyncio.create_task(client.streamed(PROMPT, headers=APART, max_tokens=10))
        leaving = await holder(mesh, service)
        assert await health(leaving) == HealthCheckResponse.SERVING
        leaving.signal(signal.SIGTERM)
        await until(lambda: leaving.event("draining"), "it drains")
        assert await health(leaving) == HealthCheckResponse.NOT_SERVING
        answer = await asking
        assert answer.token_ids == fake_tokens(PROMPT, 10)
        used = answer.prefill_worker if service == "prefill" else answer.decode_worker
        assert used == leaving.name
        assert await leaving.exit_code() == 0
        assert mesh["gateway"].event("request_lost_by_worker") is None
        again = await client.complete(PROMPT[:60], headers=APART, max_tokens=10)
        assert again.token_ids == fake_tokens(PROMPT[:60], 10)
        await mesh.idle()


@pytest.mark.parametrize("service", ["prefill", "decode"])
async def test_a_worker_is_killed_while_the_prompt_is_computed(
    tmp_path: Path, service: str
) -> None:
    async with (
        running_mesh(tmp_path, *spare(service), flags=SLOW) as mesh,
        ApiClient(mesh.url) as client,
    ):
        asking = asyncio.create_task(client.streamed(PROMPT, headers=APART, max_tokens=10))
        victim = await holder(mesh, service)
        victim.kill()
        answer = await asking
        assert answer.token_ids == fake_tokens(PROMPT, 10)
        assert victim.name not in (answer.prefill_worker, answer.decode_worker)
        lost = mesh["gateway"].event("request_lost_by_worker")
        assert lost is not None
        assert lost["num_tokens"] == 0
        await mesh.idle()


@pytest.mark.parametrize("service", ["prefill", "decode"])
async def test_a_worker_hangs_and_wakes_up_again(tmp_path: Path, service: str) -> None:
    """Nobody closes a connection: only the lack of progress tells."""
    async with (
        running_mesh(tmp_path, *spare(service), flags=SLOW) as mesh,
        ApiClient(mesh.url) as client,
    ):
        if service == "prefill":
            asking = asyncio.create_task(client.streamed(PROMPT, headers=APART, max_tokens=10))
            victim = await holder(mesh, service)
            victim.signal(signal.SIGSTOP)
            answer = await asking
            assert answer.token_ids == fake_tokens(PROMPT, 10)
            assert answer.prefill_worker != victim.name
        else:
            async with client.stream(PROMPT[:50], headers=APART, max_tokens=80) as stream:
                await stream.read(10)
                victim = mesh[stream.answer.decode_worker]
                victim.signal(signal.SIGSTOP)
                answer = await stream.finish()
            assert answer.token_ids == fake_tokens(PROMPT[:50], 80)
        gateway = await scrape(f"{mesh.url}/metrics")
        moves = gateway.value("kvmesh_gateway_moves_total")
        # A worker that hangs before it says that it took the request is one that did not answer.
        assert moves + gateway.value("kvmesh_gateway_refusals_total", reason="lost") >= 1
        await until(lambda: mesh["scheduler"].event("worker_lost"), "its lease ends")
        victim.signal(signal.SIGCONT)
        # What it still held is cancelled, and it is a member again.
        await mesh.idle()
        await mesh.all_known()
        again = await client.complete(PROMPT[:60], headers=APART, max_tokens=10)
        assert again.token_ids == fake_tokens(PROMPT[:60], 10)
