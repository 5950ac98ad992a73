"""A whole mesh over vLLM: what a request asks for is the same everywhere, and after a kill."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.core.types import SamplingParams
from tests.e2e.api_client import Answer, ApiClient
from tests.e2e.test_parity import CASES, Said, check_all_ways
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER, running_mesh
from tests.vllm.oracle import some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm
from tests.waiting import until

VLLM = {"engine.block-size": BLOCK_SIZE, "engine.num-blocks": 400}
FLAGS = {"prefill": VLLM, "decode": VLLM}
NUM_TOKENS = 40


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
            load = _Load(client, prompts)
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
    expected = _undisturbed(prompts)
    for index, answer in load.answers:
        assert answer.ok, (answer.status, answer.error)
        assert answer.token_ids == expected[index], f"prompt {index}"
    assert len(load.answers) >= 40


@dataclass
class _Load:
    """Clients that ask one request after the other; each prompt is its own seed."""

    client: ApiClient
    prompts: Sequence[list[int]]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    stopping: bool = False

    async def run(self, number: int) -> None:
        draw = random.Random(number)
        while not self.stopping:
            index = draw.randrange(len(self.prompts))
            answer = await self.client.streamed(
                self.prompts[index], temperature=1.0, seed=index, max_tokens=NUM_TOKENS
            )
            self.answers.append((index, answer))

    async def more(self, count: int) -> None:
        goal = len(self.answers) + count
        await until(lambda: len(self.answers) >= goal, f"{count} more answers", 120)


def _undisturbed(prompts: Sequence[list[int]]) -> list[list[int]]:
    """What one engine alone says."""
    runner = load_vllm(MODEL_FOLDER, num_blocks=400, dtype="float32")
    found = []
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_TOKENS)
        found += generated(runner, [prompt], sampling)
    runner.close()
    return found
