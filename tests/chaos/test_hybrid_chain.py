"""Long prompts of hybrid models that two workers compute together, through all services.

Layers of convolutions or of linear attention between those of full attention: what passes from
worker to worker is a state here, and keys and values there. A worker dies, or hangs, in a layer.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import Lfm2Config, Qwen3NextConfig

from tests.e2e.api_client import Answer, ApiClient
from tests.integration.families import NEW_TOKENS, Checkpoint
from tests.integration.family_shapes import DELTA, SHAPE
from tests.mesh_child import Child
from tests.mesh_processes import NO_FLAGS, Flags, Mesh, running_mesh
from tests.unit.gateway.tiny_model import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_LAYERS = 8
LENGTH = 2800
PREFILL = ("prefill-0", "prefill-1")
EVERY_LAYER = range(NUM_LAYERS - 1)
EIGHT = SHAPE | {"num_hidden_layers": NUM_LAYERS}
CONFIGS = {
    "lfm2": Lfm2Config(
        **EIGHT,
        layer_types=["conv", "full_attention"] * (NUM_LAYERS // 2),
        block_multiple_of=16,
        block_ffn_dim_multiplier=0.8,
    ),
    "qwen3-next": Qwen3NextConfig(
        **(EIGHT | DELTA | {"head_dim": 32}),
        layer_types=["linear_attention", "full_attention"] * (NUM_LAYERS // 2),
        linear_conv_kernel_dim=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
    ),
}


@pytest.fixture(scope="module", params=["lfm2", pytest.param("qwen3-next", marks=pytest.mark.long)])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    made = Checkpoint(request.param, folder, (LENGTH,), CONFIGS[request.param])
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return made


@asynccontextmanager
async def mesh_of(
    checkpoint: Checkpoint, folder: Path, gateway: Flags = NO_FLAGS
) -> AsyncIterator[tuple[Mesh, ApiClient]]:
    """Two prefill workers, whose engines can be ill, and one that decodes.

    Args:
        gateway: more flags of the gateway.
    """
    engine: dict[str, object] = {
        "engine.model": checkpoint.folder,
        "engine.num-blocks": 1024,
        # A step is less than a layer, so a worker can die in any of them.
        "engine.max-batch-tokens": 128,
    }
    flags: dict[str, Flags] = {
        "prefill": engine,
        "decode": engine,
        "scheduler": {"kvmanager.timeout-s": 5.0},
        "gateway": {
            "model.path": checkpoint.folder,
            "scheduler.route-timeout-s": 10.0,
            "limits.ttft-deadline-ms": 60_000,
            **gateway,
        },
    }
    async with (
        running_mesh(folder, 2, 1, engine="kvmesh", flags=flags, faulty=PREFILL) as mesh,
        ApiClient(mesh.url) as client,
    ):
        yield mesh, client


async def ask(client: ApiClient, checkpoint: Checkpoint, salt: str, lost: str = "first") -> Answer:
    """The same prompt again; each salt has a cache of its own.

    Args:
        lost: which worker is lost meanwhile, if one is. Without the first one the last one computes
            all; without the last one the attempt moves to the other, which may have its part.
    """
    (prompt,), (expected,) = checkpoint.prompts, checkpoint.expected
    answer = await client.complete(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, cache_salt=salt)
    assert answer.token_ids == expected
    reason, worker, *_ = answer.headers["x-kvmesh-decision"].split("; ")
    assert reason in ({"chain"} if lost == "first" else {"load", "prefix"})
    assert worker.startswith("prefill=prefill-")
    return answer


async def outcomes(mesh: Mesh, outcome: str) -> float:
    told = [await each.metrics() for each in mesh.workers]
    return sum(each.value("kvmesh_prompt_parts_total", outcome=outcome) for each in told)


def make_ill(mesh: Mesh, what: str) -> None:
    """Both workers; which of them is the first one of a chain is not known before."""
    for name in PREFILL:
        mesh.fault(name, what)


def make_well(mesh: Mesh) -> None:
    for name in PREFILL:
        mesh.fault(name, "")


def is_stopped(child: Child) -> bool:
    """Whether the kernel says that a process is halted."""
    assert child.process is not None
    stat = Path(f"/proc/{child.process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


async def test_a_chain_of_a_hybrid_gives_the_tokens_of_transformers(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    async with mesh_of(checkpoint, tmp_path) as (mesh, client):
        answer = await ask(client, checkpoint, "whole")
        assert await outcomes(mesh, "came") == 1
        for name in PREFILL:
            told = await mesh[name].metrics()
            assert told.value("kvmesh_prefill_offers_total", outcome="accepted") == 1
        await mesh.idle()
        # Their caches hold the prompt now; both go on from what is cached.
        again = await client.complete(
            checkpoint.prompts[0], max_tokens=NEW_TOKENS, ignore_eos=True, cache_salt="whole"
        )
        assert again.token_ids == answer.token_ids
        assert again.cached_tokens > LENGTH / 2
        await mesh.idle()


@pytest.mark.parametrize(
    ("which", "layers"),
    [
        ("first", (1, 4)),
        pytest.param("first", EVERY_LAYER, marks=pytest.mark.long, id="first-every"),
        pytest.param("last", EVERY_LAYER, marks=pytest.mark.long, id="last-every"),
    ],
)
async def test_a_worker_that_dies_in_a_layer_costs_time(
    checkpoint: Checkpoint, tmp_path: Path, which: str, layers: tuple[int, ...]
) -> None:
    async with mesh_of(checkpoint, tmp_path) as (mesh, client):
        for layer in layers:
            make_ill(mesh, f"kill {which} {layer}")
            await ask(client, checkpoint, f"killed-{layer}", which)
            (dead,) = (mesh[name] for name in PREFILL if not mesh[name].running)
            await mesh.idle()
            make_well(mesh)
            await mesh.restart(dead.name)
            await mesh.all_known()
        await ask(client, checkpoint, "well")
        await mesh.idle()


@pytest.mark.parametrize(
    ("which", "layer"),
    [
        pytest.param("first", 2, marks=pytest.mark.long),
        pytest.param("first", 5, marks=pytest.mark.long),
        pytest.param("last", 3, marks=pytest.mark.long),
    ],
)
async def test_a_worker_that_hangs_in_a_layer_is_not_waited_for(
    checkpoint: Checkpoint, tmp_path: Path, which: str, layer: int
) -> None:
    # Only this tells the gateway that the last worker hangs. If the first one does, the last one
    # begins again, which takes as long as this machine is busy.
    limits = {"limits.prefill-timeout-s": 10.0} if which == "last" else NO_FLAGS
    async with mesh_of(checkpoint, tmp_path, limits) as (mesh, client):
        make_ill(mesh, f"stop {which} {layer}")
        await ask(client, checkpoint, "stopped", which)
        make_well(mesh)
        (halted,) = (mesh[name] for name in PREFILL if is_stopped(mesh[name]))
        halted.signal(signal.SIGCONT)
        await mesh.all_known()
        await mesh.idle()
