"""All kinds of KV below a pool, in processes: down, up, and on disk after kill -9; equal tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.api_client import Answer, ApiClient, placed
from tests.integration.families import BLOCK_SIZE, NEW_TOKENS, Checkpoint
from tests.mesh_processes import Flags, Mesh, running_mesh
from tests.unit.gateway.tiny_model import make_tokenizer
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LENGTH = 250
NUM_PROMPTS = 5
CACHED = (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE
WORKER = "prefill-0"
HOST_BLOCKS = 24


@asynccontextmanager
async def mesh_of(folder: Path, checkpoint: Checkpoint) -> AsyncIterator[tuple[Mesh, ApiClient]]:
    """A prefill worker whose pool holds one or two of the prompts, above host memory and a disk."""
    model, block_bytes = checkpoint.folder, checkpoint.runner().spec.layout.block_bytes
    engine: Flags = {
        "engine.model": model,
        "engine.num-blocks": 64,
        "engine.max-batch-tokens": 48,
        "engine.state-interval-tokens": 64,
    }
    tiers: Mapping[str, object] = {
        "tiers.host-gib": HOST_BLOCKS * block_bytes / (1 << 30),
        "tiers.disk-gib": 0.1,
        "tiers.disk-path": folder / "tier",
    }
    flags: dict[str, Flags] = {
        "prefill": {**engine, **tiers},
        "decode": engine,
        "gateway": {"model.path": model},
    }
    async with (
        running_mesh(folder, 1, 1, engine="kvmesh", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        yield mesh, client


async def ask(client: ApiClient, prompt: list[int]) -> Answer:
    answer = await client.complete(
        prompt, headers=placed("disaggregated"), max_tokens=NEW_TOKENS, ignore_eos=True
    )
    assert answer.ok, answer.error
    return answer


async def counted(mesh: Mesh, what: str, *tiers: str) -> float:
    metrics = await mesh[WORKER].metrics()
    return sum(metrics.value(f"kvmesh_tier_{what}", tier=tier) for tier in tiers)


# Windows and states. Full attention: test_tiers.py; latents: tests/integration/test_tiers_disk.py.
@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        "qwen3-next",
        pytest.param("qwen3-untied", marks=pytest.mark.long),
        pytest.param("deepseek-v3", marks=pytest.mark.long),
    ],
)
async def test_all_kinds_of_blocks_go_down_and_come_up_also_after_a_kill(
    family: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(family, tmp_path / "model", (LENGTH,))
    make_tokenizer().save(str(checkpoint.folder / "tokenizer.json"))
    prompts = [
        [(token + shift) % 320 for token in checkpoint.prompts[0]] for shift in range(NUM_PROMPTS)
    ]
    expected = [checkpoint.continue_greedily(prompt) for prompt in prompts]
    folder = tmp_path / "mesh"
    folder.mkdir()
    async with mesh_of(folder, checkpoint) as (mesh, client):
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert (await ask(client, prompt)).token_ids == tokens

        async def is_down() -> bool:
            return await counted(mesh, "blocks", "disk") >= 4 * CACHED // BLOCK_SIZE

        await until(is_down, "four prompts lie on disk")
        for prompt, tokens in zip(prompts, expected, strict=True):
            again = await ask(client, prompt)
            assert (again.token_ids, again.cached_tokens) == (tokens, CACHED)
        assert await counted(mesh, "loaded_blocks_total", "host", "disk") > 0
        mesh[WORKER].kill()
        await mesh.restart(WORKER)
        await mesh.all_known()
        for prompt, tokens in zip(prompts[:3], expected, strict=False):
            after = await ask(client, prompt)
            assert (after.token_ids, after.cached_tokens) == (tokens, CACHED)
        assert await counted(mesh, "loaded_blocks_total", "disk") >= CACHED // BLOCK_SIZE
        assert await counted(mesh, "lost_blocks_total", "host", "disk") == 0
        await mesh.idle()
