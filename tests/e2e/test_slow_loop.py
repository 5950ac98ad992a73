"""PrfaaS's slow loop in real processes: measured lengths and speeds change the threshold and the
split of roles, while requests are served.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvmesh.policy.allocation_loop import MIN_LENGTHS
from tests.e2e.api_client import ApiClient
from tests.e2e.test_live_policies import decisions, prefill_workers, tokens
from tests.mesh_processes import Flags, fake_tokens, running_mesh
from tests.waiting import until

FAR = "far-0"
SHORTEST, LONGEST = 50, 450
OUTPUT_TOKENS = 4
NUM_USERS = 16

WORKER: Flags = {
    "engine.fake-step-s": 0.005,
    "engine.max-batch-tokens": 64,
    "engine.num-blocks": 1024,
}
FLAGS: dict[str, Flags] = {
    "scheduler": {
        "routing.policy": "prfaas",
        "planning.remote-cluster": "west",
        "planning.egress-mb-s": 100.0,
        # No threshold is configured: until the model has one, nothing leaves home.
        "planning.roles": "apply",
        "planning.reallocate-s": 2.0,
        "server.admin.port": 0,
    },
    "gateway": {"limits.ttft-deadline-ms": 60000},
    "prefill": WORKER,
    "decode": WORKER,
}


@pytest.mark.slow
async def test_measured_traffic_changes_threshold_and_split(tmp_path: Path) -> None:
    """One of four workers at home prefills, and nearly all of the work is prefill."""
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(running_mesh(tmp_path, 1, 3, flags=FLAGS))
        client = await stack.enter_async_context(ApiClient(mesh.url))
        there = {**mesh["prefill-0"].flags, "worker.id": FAR, "worker.cluster": "west"}
        await mesh.add(FAR, "prefill", there).ready()
        await mesh.all_known()
        draw = random.Random(7)
        asked: list[str] = []
        is_over = asyncio.Event()

        async def user() -> None:
            while not is_over.is_set():
                prompt = tokens(draw.randint(SHORTEST, LONGEST), draw.randrange(1 << 30))
                answer = await client.complete(prompt, max_tokens=OUTPUT_TOKENS)
                assert answer.token_ids == fake_tokens(prompt, OUTPUT_TOKENS)
                asked.append(answer.headers["x-kvmesh-decision"])

        async def home_prefills_with(count: int) -> bool:
            return await prefill_workers(mesh) == count + 1  # and the far one

        assert await home_prefills_with(1)
        async with asyncio.TaskGroup() as users:
            running = [users.create_task(user()) for _ in range(NUM_USERS)]
            try:
                await until(lambda: home_prefills_with(2), "a decode worker became prefill", 90)
                far = f"long_prompt; prefill={FAR}"
                await until(lambda: any(each.startswith(far) for each in asked), "some go far")
            finally:
                is_over.set()
        assert len(running) == NUM_USERS
        # Requests may go there for other reasons too, as while a worker at home is late to report.
        first_far = next(n for n, each in enumerate(asked) if each.startswith(far))
        assert first_far >= MIN_LENGTHS - NUM_USERS, "before, the lengths were not known"
        kept = [e for e in (await decisions(mesh))["fleet"] if e["kind"] == "reallocation"]
        moved = [each for each in kept if each.get("role") == "prefill"]
        assert moved[-1]["reason"] == "prefill_bottleneck"
        assert moved[-1]["outcome"] == "applied"
        assert moved[-1]["worker_id"].startswith("decode-")
        threshold = (await mesh["scheduler"].metrics()).value("kvmesh_scheduler_threshold_tokens")
        assert 0 < threshold < LONGEST
        await mesh.idle()
        assert {child.lives for child in mesh.children.values()} == {1}, "no process restarted"
