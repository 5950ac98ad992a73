"""Prompts whose KV went down below a pool, asked again through the gateway."""

from __future__ import annotations

import inspect
import random
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.api_client import Answer, ApiClient, placed
from tests.e2e.test_exactness import NUM_TOKENS, Oracle
from tests.mesh_processes import BLOCK_SIZE, MODEL_FOLDER, Mesh, running_mesh
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_PROMPTS = 5
PROMPT_BLOCKS = 40
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE + 7
NUM_BLOCKS = PROMPT_BLOCKS * 5 // 2
"""Of each pool: half of all prompts; one that is decoded leaves room for one that comes up."""

BLOCK_GIB = 6 * 2 * 4 * 32 * 4 * BLOCK_SIZE / (1 << 30)
"""Of the embedded model, in float32."""

WORKER = "prefill-0"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Real text; none begins as another does."""
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    text = inspect.getsource(random) + inspect.getsource(statistics)
    ids: list[int] = tokenizer.encode(text).ids
    return [ids[at * PROMPT_TOKENS :][:PROMPT_TOKENS] for at in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """What transformers says after them."""
    oracle = Oracle()
    return [oracle.continue_greedily(prompt) for prompt in prompts]


@asynccontextmanager
async def mesh_with(
    folder: Path, sizes: Mapping[str, int], service: str = "prefill"
) -> AsyncIterator[tuple[Mesh, ApiClient]]:
    """One prefill and one decode worker; one of them has tiers of so many blocks."""
    engine: dict[str, object] = {"engine.num-blocks": NUM_BLOCKS}
    tiers: dict[str, object] = {
        f"tiers.{tier}-gib": num_blocks * BLOCK_GIB for tier, num_blocks in sizes.items()
    }
    if "disk" in sizes:
        tiers["tiers.disk-path"] = folder / "tier"
    flags = {"prefill": engine, "decode": engine}
    # One reader may be lent half of the pool: a whole prompt.
    flags[service] = {**engine, **tiers, "fetch.max-share": 1.0}
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            running_mesh(folder, 1, 1, engine="kvmesh", flags=flags)
        )
        yield mesh, await stack.enter_async_context(ApiClient(mesh.url))
        await mesh.idle()


async def ask(client: ApiClient, prompt: Sequence[int]) -> Answer:
    answer = await client.complete(
        list(prompt), headers=placed("disaggregated"), max_tokens=NUM_TOKENS, ignore_eos=True
    )
    assert answer.ok, answer.error
    return answer


async def count(mesh: Mesh, what: str, *tiers: str) -> float:
    """A counter of the worker that has tiers, the sum over these."""
    told = [await worker.metrics() for worker in mesh.workers]
    return sum(each.value(f"kvmesh_tier_{what}", tier=tier) for each in told for tier in tiers)


async def fill(mesh: Mesh, client: ApiClient, prompts: list[list[int]], *tiers: str) -> None:
    """Computes all prompts; all of them lie below then, and the scheduler knows."""
    for number, prompt in enumerate(prompts, 1):
        assert (await ask(client, prompt)).cached_tokens == 0
        # A pool that is full is copied whole, and nothing is evicted before.
        least = number * PROMPT_BLOCKS if number > 1 else 0

        async def is_kept(least: int = least) -> bool:
            return await count(mesh, "blocks", *tiers) >= least

        await until(is_kept, f"{least} blocks are copied")

    async def are_told() -> bool:
        told = await mesh["scheduler"].metrics()
        return told.value("kvmesh_scheduler_index_blocks") >= NUM_PROMPTS * PROMPT_BLOCKS

    await until(are_told, "the scheduler knows them")


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"host": 8 * PROMPT_BLOCKS}, id="host", marks=pytest.mark.long),
        pytest.param({"disk": 8 * PROMPT_BLOCKS}, id="disk", marks=pytest.mark.long),
        pytest.param({"host": 2 * PROMPT_BLOCKS, "disk": 8 * PROMPT_BLOCKS}, id="host, then disk"),
    ],
)
async def test_an_evicted_prompt_is_computed_once(
    tmp_path: Path, prompts: list[list[int]], expected: list[list[int]], sizes: dict[str, int]
) -> None:
    async with mesh_with(tmp_path, sizes) as (mesh, client):
        await fill(mesh, client, prompts, *sizes)
        for prompt, tokens in zip(prompts, expected, strict=True):
            again = await ask(client, prompt)
            assert again.token_ids == tokens
            assert again.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
            assert again.prefill_worker == WORKER
        # Each was evicted by those after it, but for what two prompts leave in the pool.
        least = (NUM_PROMPTS - 2) * PROMPT_BLOCKS
        assert await count(mesh, "loaded_blocks_total", *sizes) >= least
        assert await count(mesh, "lost_blocks_total", *sizes) == 0
        metrics = await mesh[WORKER].metrics()
        assert metrics.value("kvmesh_tier_prefetches_total") >= NUM_PROMPTS - 2


async def test_another_worker_reads_what_lies_below_a_pool(
    tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with mesh_with(tmp_path, {"host": 8 * PROMPT_BLOCKS}, "decode") as (mesh, client):
        await fill(mesh, client, prompts, "host")
        before = await count(mesh, "loaded_blocks_total", "host")
        answer = await ask(client, prompts[0])
        assert answer.token_ids == expected[0]
        assert answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
        assert await count(mesh, "loaded_blocks_total", "host") > before


async def test_a_killed_worker_has_on_disk_what_it_had(
    tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    async with mesh_with(tmp_path, {"disk": 8 * PROMPT_BLOCKS}) as (mesh, client):
        await fill(mesh, client, prompts, "disk")
        mesh[WORKER].kill()
        await mesh.restart(WORKER)
        await mesh.all_known()
        kept = await count(mesh, "blocks", "disk")

        async def are_told() -> bool:
            told = await mesh["scheduler"].metrics()
            return told.value("kvmesh_scheduler_index_blocks") >= kept

        await until(are_told, "what its file holds is known")
        answer = await ask(client, prompts[0])
        assert answer.token_ids == expected[0]
        assert answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
        assert await count(mesh, "loaded_blocks_total", "disk") >= PROMPT_BLOCKS
