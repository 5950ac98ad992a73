"""Clients whose streams must not show what happens to the workers of a mesh over vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.core.types import SamplingParams
from tests.e2e.api_client import Answer, ApiClient
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER
from tests.vllm_engine import load_vllm
from tests.waiting import until

NUM_TOKENS = 40


@dataclass
class Load:
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


def undisturbed(
    prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS, *, ignore_eos: bool = False
) -> list[list[int]]:
    """What one engine alone says."""
    runner = load_vllm(MODEL_FOLDER, num_blocks=400, dtype="float32")
    found = []
    for seed, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=ignore_eos
        )
        found += generated(runner, [prompt], sampling)
    runner.close()
    return found
