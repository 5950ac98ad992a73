"""A whole mesh over vLLM: what a request asks for is the same everywhere, and after a kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.api_client import ApiClient
from tests.e2e.test_parity import CASES, Said, check_all_ways
from tests.mesh_processes import running_mesh
from tests.vllm.oracle import some_prompts
from tests.vllm.streams import Load, undisturbed
from tests.vllm_engine import BLOCK_SIZE

VLLM = {"engine.block-size": BLOCK_SIZE, "engine.num-blocks": 400}
FLAGS = {"prefill": VLLM, "decode": VLLM}


async def test_every_feature_is_the_same_everywhere_and_after_a_move(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, 1, 1, engine="vllm", flags=FLAGS) as mesh:
        await check_all_ways(mesh, 300, _has_form)


def _has_form(name: str, said: Said) -> bool:
    # Which tokens this model draws, and so whether a long form ends, is the engine's.
    return said.finish_reason != "length" or "ignore_eos" in CASES[name].body


async def test_workers_killed_in_a_loop_under_streams(tmp_path: Path) -> None:
    """Prefill and decode workers by turns, under eight clients: nobody notices anything."""
    prompts = some_prompts(24, 200, seed=5)
    async with running_mesh(tmp_path, 2, 2, engine="vllm", flags=FLAGS) as mesh:
        async with ApiClient(mesh.url) as client, asyncio.TaskGroup() as clients:
            load = Load(client, prompts)
            for number in range(8):
                clients.create_task(load.run(number))
            await load.more(8)
            for victim in ("prefill-0", "decode-1", "prefill-1", "decode-0"):
                mesh[victim].kill()
                await load.more(8)
                await mesh.restart(victim)
                await mesh.all_known()
            load.stopping = True
        await mesh.idle()
    expected = undisturbed(prompts)
    for index, answer in load.answers:
        assert answer.ok, (answer.status, answer.error)
        assert answer.token_ids == expected[index], f"prompt {index}"
    assert len(load.answers) >= 40
