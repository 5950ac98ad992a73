"""The pool as programs outside of the mesh use it: what they store others find, ask and read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import BlockHash, RefusalReason, WorkerId
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.policy.cache_load import CachedRequest, PoolHardware
from kvmesh.pool.plans import QueryPlan, TransferPlan
from kvmesh.pool.pool import Pool, open_pool
from tests.e2e.api_client import ApiClient, placed
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.mesh_child import ROOT
from tests.mesh_processes import MODEL, Flags, Mesh, running_mesh
from tests.unit.gateway.tiny_model import make_tokenizer
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

WORKER = WorkerId("prefill-0")
NUM_BLOCKS = 5
NUM_HEADS = 8
DRAW = np.random.default_rng(22)
EXAMPLE = ROOT / "docs" / "examples" / "pool_prefix.py"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A prefill worker that takes one prefix at a time, and a decode worker that takes none."""
    short: dict[str, object] = {"fetch.max-stores": 1, "worker.lease-s": 1.0}
    flags = {"prefill": short}
    folder = tmp_path_factory.mktemp("pool")
    async with running_mesh(folder, 1, 1, engine="kvmesh", flags=flags) as mesh:
        yield mesh
        await mesh.idle()


@pytest.fixture
async def pool(mesh: Mesh) -> AsyncIterator[Pool]:
    where = mesh["kvmanager"].address, [mesh["scheduler"].address], MODEL
    async with open_pool(*where, mesh.access) as pool:
        yield pool


def names(pool: Pool, seed: int, num_blocks: int = NUM_BLOCKS) -> list[BlockHash]:
    root = root_hash(pool.layout.model_fingerprint, cache_salt=f"outside {seed}")
    size = pool.layout.block_size
    return chain_hashes(root, range(num_blocks * size), size)


def plan_for(pool: Pool, hashes: list[BlockHash], worker: str) -> TransferPlan:
    tree = pool.get_prefix_tree()
    return TransferPlan(next(e.info for n, e in tree.workers.items() if n == worker), tuple(hashes))


async def store(pool: Pool, hashes: list[BlockHash]) -> Any:
    """Stores invented KV: [blocks, layers, 2, positions, kv heads, head_dim]."""
    layout = pool.layout
    shape = (layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    async with pool.init_transfer(plan_for(pool, hashes, "prefill-0")) as buffer:
        kv = DRAW.standard_normal((buffer.num_blocks, *shape), np.float32)
        buffer.blocks[:] = kv.tobytes()
        await pool.put(buffer)
    assert await pool.found(hashes)
    return kv


async def test_what_is_stored_is_asked_and_read_where_it_is(pool: Pool) -> None:
    hashes = names(pool, 1)
    assert pool.get_prefix_tree().holders(hashes) == {}
    kv = await store(pool, hashes)
    tree = pool.get_prefix_tree()
    assert tree.holders(hashes) == {"prefill-0": NUM_BLOCKS}
    plans = pool.gen_plans([hashes], [1], tree)
    (query,) = plans.query_plans
    assert query is not None
    assert plans.transfer_plans == (None,)
    assert plans.groups == (("prefill-0",),)
    assert bytes(await pool.read(query)) == kv.tobytes()
    async with pool.init_query(query, 3, NUM_HEADS) as buffer:
        for layer in (0, pool.layout.num_layers - 1):
            asked = DRAW.standard_normal((3, NUM_HEADS, pool.layout.head_dim), np.float32)
            buffer.queries[:] = asked.tobytes()
            answer = await pool.query(buffer, layer)
            output, sums = attention(asked, kv[:, layer])
            found = np.frombuffer(answer.output, np.float32).reshape(output.shape)
            np.testing.assert_allclose(found, output, rtol=2e-3, atol=2e-4)
            lse = np.frombuffer(answer.lse, np.float32).reshape(sums.shape)
            np.testing.assert_allclose(lse, sums, rtol=1e-3)


def attention(queries: Any, kv: Any) -> tuple[Any, Any]:
    """Of [queries, heads, dim] to [blocks, 2, positions, kv heads, dim], and its normaliser."""
    keys, values = (kv[:, at].reshape(-1, *kv.shape[3:]) for at in (0, 1))
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))
    scores = np.einsum("qhd,khd->qhk", queries, keys) / np.sqrt(queries.shape[2])
    sums = np.log(np.exp(scores).sum(-1))
    return np.einsum("qhk,khd->qhd", np.exp(scores - sums[..., None]), values), sums


async def test_only_what_is_missing_is_sent(pool: Pool) -> None:
    hashes = names(pool, 2, 2 * NUM_BLOCKS)
    first = await store(pool, hashes[:NUM_BLOCKS])
    rest = await store(pool, hashes)
    assert len(rest) == NUM_BLOCKS
    (query,) = pool.gen_plans([hashes], [1], pool.get_prefix_tree()).query_plans
    assert query is not None
    assert bytes(await pool.read(query)) == first.tobytes() + rest.tobytes()
    async with pool.init_transfer(plan_for(pool, hashes, "prefill-0")) as buffer:
        assert (buffer.num_blocks, buffer.reservation) == (0, None)
        await pool.put(buffer)


async def test_room_that_nobody_fills_is_given_back(mesh: Mesh, pool: Pool) -> None:
    plan = plan_for(pool, names(pool, 3), "prefill-0")
    async with pool.init_transfer(plan) as late:
        with pytest.raises(RefusedError) as busy:
            async with pool.init_transfer(plan_for(pool, names(pool, 4), "prefill-0")):
                raise AssertionError("one at a time")
        assert busy.value.refusal.reason is RefusalReason.BUSY
        await mesh.idle()
        await until(lambda: takes(pool, names(pool, 5)), "there is room again")
        with pytest.raises(RefusedError) as stale:
            await pool.put(late)
        assert stale.value.refusal.reason is RefusalReason.STALE
    assert pool.get_prefix_tree().holders(names(pool, 3)) == {}


async def takes(pool: Pool, hashes: list[BlockHash]) -> bool:
    try:
        await store(pool, hashes)
    except RefusedError:
        return False
    return True


async def test_a_worker_takes_nothing_unless_it_is_told_to(pool: Pool) -> None:
    with pytest.raises(RefusedError, match=r"fetch.max_stores is 0") as refused:
        async with pool.init_transfer(plan_for(pool, names(pool, 6), "decode-0")):
            raise AssertionError("closed by default")
    assert refused.value.refusal.reason is RefusalReason.INVALID


async def test_more_than_a_worker_has_is_refused(pool: Pool) -> None:
    for num_blocks in (600, 2000):
        with pytest.raises(RefusedError) as refused:
            async with pool.init_transfer(plan_for(pool, names(pool, 7, num_blocks), "prefill-0")):
                raise AssertionError("it has 1,024, of which it lends half")
        assert refused.value.refusal.reason is RefusalReason.NO_BLOCKS


async def test_the_pool_of_a_model_that_nobody_serves_is_not_there(mesh: Mesh) -> None:
    where = mesh["kvmanager"].address, [mesh["scheduler"].address], "another"
    with pytest.raises(LostError, match="no worker serves another"):
        async with open_pool(*where, mesh.access, timeout_s=1.0):
            raise AssertionError("nobody serves it")


async def test_what_went_below_the_pool_is_asked_and_read_all_the_same(tmp_path: Path) -> None:
    """A pool of 40 blocks, of which others take all."""
    flags: dict[str, Flags] = {
        "prefill": {
            "fetch.max-stores": 1,
            "fetch.max-share": 1.0,
            "engine.num-blocks": 40,
            "tiers.disk-gib": 0.05,
            "tiers.disk-path": tmp_path / "tier",
        }
    }
    folder = tmp_path / "mesh"
    folder.mkdir()
    async with (
        running_mesh(folder, 1, 1, engine="kvmesh", flags=flags) as mesh,
        open_pool(
            mesh["kvmanager"].address, [mesh["scheduler"].address], MODEL, mesh.access
        ) as pool,
    ):
        hashes = names(pool, 10)
        kv = await store(pool, hashes)
        for seed in range(11, 20):
            await store(pool, names(pool, seed, 2 * NUM_BLOCKS))
        assert pool.get_prefix_tree().holders(hashes) == {"prefill-0": NUM_BLOCKS}
        (query,) = pool.gen_plans([hashes], [1], pool.get_prefix_tree()).query_plans
        assert query is not None
        assert await loaded_blocks(mesh) == 0
        assert bytes(await pool.read(query)) == kv.tobytes()
        assert await loaded_blocks(mesh) == NUM_BLOCKS
        for seed in range(21, 30):
            await store(pool, names(pool, seed, 2 * NUM_BLOCKS))
        async with pool.init_query(query, 3, NUM_HEADS) as buffer:
            asked = DRAW.standard_normal((3, NUM_HEADS, pool.layout.head_dim), np.float32)
            buffer.queries[:] = asked.tobytes()
            answer = await pool.query(buffer, 0)
            output, _ = attention(asked, kv[:, 0])
            found = np.frombuffer(answer.output, np.float32).reshape(output.shape)
            np.testing.assert_allclose(found, output, rtol=2e-3, atol=2e-4)
        assert await loaded_blocks(mesh) == 2 * NUM_BLOCKS
        for seed in range(31, 40):
            await store(pool, names(pool, seed, 2 * NUM_BLOCKS))
        async with pool.init_transfer(plan_for(pool, hashes, "prefill-0")) as buffer:
            assert buffer.num_blocks == 0, "it has them below"
        assert await loaded_blocks(mesh) == 3 * NUM_BLOCKS
        await mesh.idle()


async def loaded_blocks(mesh: Mesh) -> float:
    metrics = await mesh["prefill-0"].metrics()
    return metrics.value("kvmesh_tier_loaded_blocks_total", tier="disk")


async def test_of_a_model_with_windows_all_that_a_reader_needs_is_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint("gemma3", tmp_path / "model", (250,))
    make_tokenizer().save(str(checkpoint.folder / "tokenizer.json"))
    engine: Flags = {"engine.model": checkpoint.folder, "engine.num-blocks": 400}
    flags: dict[str, Flags] = {
        "prefill": engine,
        "decode": engine,
        "gateway": {"model.path": checkpoint.folder},
    }
    folder = tmp_path / "mesh"
    folder.mkdir()
    (prompt,) = checkpoint.prompts
    async with running_mesh(folder, 1, 1, engine="kvmesh", flags=flags) as mesh:
        async with ApiClient(mesh.url) as client:
            answer = await client.complete(
                prompt, max_tokens=NEW_TOKENS, headers=placed("disaggregated"), ignore_eos=True
            )
            assert answer.token_ids == checkpoint.expected[0]
        where = mesh["kvmanager"].address, [mesh["scheduler"].address], MODEL
        async with open_pool(*where, mesh.access) as pool:
            root = root_hash(pool.layout.model_fingerprint)
            hashes = chain_hashes(root, prompt, pool.layout.block_size)
            await until(lambda: WORKER in pool.get_prefix_tree().holders(hashes), "it is known")
            info = plan_for(pool, hashes, "prefill-0").target
            kv = await pool.read(QueryPlan(info, tuple(hashes)))
            # A group of full attention, and two with windows of 40 tokens: three blocks each.
            num_blocks, rest = divmod(len(kv), pool.layout.block_bytes)
            assert (num_blocks, rest) == (15 + 2 * 3, 0)
        await mesh.idle()


def test_the_load_of_the_pool_is_that_of_the_paper() -> None:
    hardware = PoolHardware(8, 2e12, 312e12, 4096)
    load = Pool.get_cache_load([CachedRequest(32_000, 512)], 0.1, hardware)
    computed = 2 * 4096 * 32_000 * 512
    assert load == pytest.approx(computed / (computed + 8 * 312e12 * 0.1))


async def test_another_program_of_60_lines_stores_and_reads_a_prefix(mesh: Mesh) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        *("--kvmanager", mesh["kvmanager"].address, "--scheduler", mesh["scheduler"].address),
        *("--model", MODEL, "--secret-file", str(mesh.secret_file)),
        env={"PYTHONPATH": str(ROOT / "libs")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await program.communicate()
    assert program.returncode == 0, told.decode()
    assert told.decode().endswith("read from prefill-0: the same bytes\n")
