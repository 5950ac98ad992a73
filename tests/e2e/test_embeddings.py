"""Embeddings through a whole mesh: the same wherever a prompt runs, and no KV goes to decode."""

from __future__ import annotations

import random
from typing import Any

import aiohttp
import pytest

from kvmesh.engine.fake import FakeRunner
from tests.e2e.api_client import placed
from tests.engine_alone import embedded
from tests.mesh_processes import BLOCK_SIZE, MODEL_FOLDER, VOCAB_SIZE, Mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def vectors(mesh: Mesh, prompts: list[list[int]], placement: str) -> list[list[float]]:
    async with (
        aiohttp.ClientSession(mesh.url, headers=placed(placement)) as session,
        session.post("/v1/embeddings", json={"input": prompts}) as response,
    ):
        body: Any = await response.json()
        assert response.status == 200, body
        assert response.headers["x-kvmesh-placement"] == placement
        assert body["usage"]["total_tokens"] == sum(map(len, prompts))
        return [each["embedding"] for each in body["data"]]


async def sent_bytes(mesh: Mesh) -> float:
    told = [await each.metrics() for each in mesh.workers]
    return sum(each.value("kvmesh_kv_transfer_bytes_sum") for each in told)


async def test_vectors_are_those_of_one_engine_and_no_kv_is_sent(fake_mesh: Mesh) -> None:
    draw = random.Random(41)
    prompts = [draw.choices(range(5, VOCAB_SIZE), k=count) for count in (1, 40, 700, 1500)]
    runner = FakeRunner.for_checkpoint(
        MODEL_FOLDER, name="alone", num_blocks=512, block_size=BLOCK_SIZE
    )
    expected = [memoryview(each).cast("f").tolist() for each in embedded(runner, prompts)]
    runner.close()
    before = await sent_bytes(fake_mesh)
    for placement in ("disaggregated", "aggregated", "disaggregated"):
        assert await vectors(fake_mesh, prompts, placement) == expected
    await fake_mesh.idle()
    assert await sent_bytes(fake_mesh) == before
