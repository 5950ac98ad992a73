"""Requests that keep coming while something breaks; each has one known right answer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.e2e.api_client import Answer, ApiClient
from tests.mesh_processes import VOCAB_SIZE, fake_tokens
from tests.waiting import until


def a_prompt(draw: random.Random, shortest: int = 20, longest: int = 200) -> list[int]:
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(shortest, longest))]


@dataclass
class Load:
    """Clients that ask one request after the other.

    Attributes:
        headers: of each request.
        answers: prompt, seed and answer of each request that ended, in order.
    """

    client: ApiClient
    max_tokens: int
    headers: Mapping[str, str] = field(default_factory=dict)
    answers: list[tuple[list[int], int, Answer]] = field(default_factory=list)
    stopping: bool = False

    async def run(self, number: int) -> None:
        draw = random.Random(f"client {number}")
        for seed in itertools.count(number * 1000):
            if self.stopping:
                return
            prompt = a_prompt(draw)
            answer = await self.client.streamed(
                prompt,
                headers=self.headers,
                temperature=1.0,
                seed=seed,
                max_tokens=self.max_tokens,
            )
            self.answers.append((prompt, seed, answer))

    async def more(self, count: int, timeout_s: float = 30.0) -> None:
        """Waits until so many more requests have ended."""
        goal = len(self.answers) + count
        await until(lambda: len(self.answers) >= goal, f"{count} more answers", timeout_s)

    def check_tokens(self) -> None:
        """Every answer that is one has exactly the tokens of an undisturbed engine."""
        for prompt, seed, answer in self.answers:
            if answer.ok:
                expected = fake_tokens(prompt, self.max_tokens, temperature=1.0, seed=seed)
                assert answer.token_ids == expected, f"seed {seed}"

    def check_all_ok(self) -> None:
        """Nobody noticed anything."""
        failed = [(a.status, a.error) for _, _, a in self.answers if not a.ok]
        assert failed == []
        self.check_tokens()


@asynccontextmanager
async def under_load(
    client: ApiClient,
    num_clients: int = 6,
    max_tokens: int = 20,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Load]:
    """Clients at work; at the end all their requests are over."""
    load = Load(client, max_tokens, headers or {})
    async with asyncio.TaskGroup() as clients:
        for number in range(num_clients):
            clients.create_task(load.run(number))
        try:
            await load.more(num_clients)
            yield load
        finally:
            load.stopping = True
