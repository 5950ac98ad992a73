"""Workers with KV on disk: killed while copies go down, on a disk that takes no more, and on one
that gives back something else.
"""

from __future__ import annotations

import asyncio
import random
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.e2e.api_client import Answer, ApiClient, placed
from tests.mesh_processes import BLOCK_SIZE, VOCAB_SIZE, Mesh, fake_tokens, running_mesh
from tests.waiting import until

NUM_BLOCKS = 200
PROMPT_BLOCKS = 40
NUM_PROMPTS = 20
"""Four times what a pool holds."""

TOKEN_BYTES = 1024
DRAW = random.Random(22)
PROMPTS = [
    [DRAW.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE + 5)]
    for _ in range(NUM_PROMPTS)
]
WORKER = "prefill-0"


@asynccontextmanager
async def mesh_with_disk(folder: Path) -> AsyncIterator[tuple[Mesh, ApiClient]]:
    engine: dict[str, object] = {
        "engine.num-blocks": NUM_BLOCKS,
        "engine.fake-token-bytes": TOKEN_BYTES,
        # Computing a prompt takes two steps, and so much longer than bringing it up from disk.
        "engine.fake-step-s": 0.03,
    }
    tiers: dict[str, object] = {"tiers.disk-gib": 0.05, "tiers.disk-path": str(folder / "tier")}
    flags = {"prefill": {**engine, **tiers}, "decode": engine}
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(running_mesh(folder, 1, 1, flags=flags))
        yield mesh, await stack.enter_async_context(ApiClient(mesh.url))


async def ask(client: ApiClient, number: int) -> Answer:
    prompt = PROMPTS[number]
    answer = await client.complete(prompt, max_tokens=4, headers=placed("disaggregated"))
    assert answer.token_ids == fake_tokens(prompt, 4)
    return answer


async def of_tier(mesh: Mesh, what: str) -> float:
    metrics = await mesh[WORKER].metrics()
    return metrics.value(f"kvmesh_tier_{what}", tier="disk")


async def stored(mesh: Mesh, num_blocks: int) -> None:
    async def is_there() -> bool:
        return await of_tier(mesh, "stored_blocks_total") >= num_blocks

    await until(is_there, f"{num_blocks} blocks have gone down")


async def test_a_worker_killed_in_a_write_back_finds_its_blocks(tmp_path: Path) -> None:
    async with mesh_with_disk(tmp_path) as (mesh, client):
        asking = [asyncio.create_task(ask(client, number)) for number in range(NUM_PROMPTS)]
        # Half of them have gone down, and the others are on their way.
        await stored(mesh, NUM_PROMPTS * PROMPT_BLOCKS // 2)
        mesh[WORKER].kill()
        await mesh.restart(WORKER)
        await asyncio.gather(*asking, return_exceptions=True)
        await mesh.all_known()
        assert await of_tier(mesh, "blocks") >= NUM_BLOCKS, "what had gone down is found"
        for number in range(NUM_PROMPTS):
            await ask(client, number)
        assert await of_tier(mesh, "loaded_blocks_total") >= PROMPT_BLOCKS
        assert await of_tier(mesh, "lost_blocks_total") == 0
        await mesh.idle()


async def test_a_disk_that_takes_no_more_costs_no_request(tmp_path: Path) -> None:
    async with mesh_with_disk(tmp_path) as (mesh, client):
        for number in range(NUM_PROMPTS // 2):
            await ask(client, number)
        await stored(mesh, NUM_BLOCKS)
        before = await of_tier(mesh, "stored_blocks_total")
        # Writes behind this size fail, logs are shorter.
        worker = mesh[WORKER].process
        assert worker is not None
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for number in range(NUM_PROMPTS // 2, NUM_PROMPTS):
            await ask(client, number)
        for number in range(NUM_PROMPTS):
            await ask(client, number)
        assert await of_tier(mesh, "stored_blocks_total") - before < NUM_BLOCKS
        await mesh.idle()


async def test_a_disk_that_corrupts_costs_no_token(tmp_path: Path) -> None:
    async with mesh_with_disk(tmp_path) as (mesh, client):
        for number in range(NUM_PROMPTS):
            await ask(client, number)
        await stored(mesh, NUM_BLOCKS)
        block_bytes = TOKEN_BYTES * BLOCK_SIZE
        (path,) = (tmp_path / "tier").glob("*.kv")
        with path.open("r+b") as file:
            for at in range(path.stat().st_size - block_bytes, 1 << 20, -block_bytes):
                file.seek(at)
                file.write(b"spoilt")
        for number in range(NUM_PROMPTS):
            await ask(client, number)
        assert await of_tier(mesh, "lost_blocks_total") > 0
        await mesh.idle()
