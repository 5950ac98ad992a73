"""A client that sends completions and notes when their tokens came.

Tests: tests/integration/test_profile_command.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

VOCAB = (16, 4000)
"""Token ids that every vocabulary has, the embedded model's too, without special ones."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a request was sent and each of its tokens came, in seconds on one clock.

    Attributes:
        token_s: one entry per token; those of one piece came together.
        placement: where it ran: aggregated or disaggregated.
    """

    sent_s: float
    token_s: tuple[float, ...]
    placement: str

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


class StackClient:
    """Asks a running stack.

    Args:
        url: base URL of the gateway.
        seed: seed of the prompts, of which no two are alike.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._metrics_url = f"{url}/metrics"
        self._model = model
        self._draw = random.Random(seed)

    async def complete(
        self, input_tokens: int, output_tokens: int, placement: str = ""
    ) -> Timing | None:
        """Sends a streamed completion of random tokens; None if it was refused.

        Args:
            placement: the placement to ask for; empty leaves it to the policy.
        """
        prompt = [self._draw.randrange(*VOCAB) for _ in range(input_tokens)]
        return await self.complete_prompt(prompt, output_tokens, placement)

    async def complete_prompt(
        self, prompt: Sequence[int], output_tokens: int, placement: str = ""
    ) -> Timing | None:
        """Does the same as `complete` with a given prompt."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        headers = {"x-kvmesh-placement": placement} if placement else {}
        sent = time.perf_counter()
        async with self._session.post(self._url, json=body, headers=headers) as response:
            if response.status in (429, 503):
                return None
            response.raise_for_status()
            times = await _token_times(response.content)
            assert len(times) == output_tokens, f"{len(times)} tokens of {output_tokens}"
            return Timing(sent, tuple(times), response.headers["x-kvmesh-placement"])

    async def metrics(self) -> str:
        """Returns the gateway's metrics in Prometheus' text format."""
        async with self._session.get(self._metrics_url) as response:
            response.raise_for_status()
            return await response.text()

    async def together(self, count: int, input_tokens: int, output_tokens: int) -> list[Timing]:
        """Sends several at once, to a decode worker that computes no prompts of its own."""
        asked = [self.complete(input_tokens, output_tokens, "disaggregated") for _ in range(count)]
        found = await asyncio.gather(*asked)
        return [each for each in found if each is not None]


async def _token_times(content: aiohttp.StreamReader) -> list[float]:
    times: list[float] = []
    async for line in content:
        if not line.startswith(b"data: {"):
            continue
        event: Mapping[str, list[Mapping[str, list[int]]]] = json.loads(line[6:])
        now = time.perf_counter()
        for choice in event.get("choices") or ():
            times += [now] * len(choice.get("token_ids") or ())
    return times
