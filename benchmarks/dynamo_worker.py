"""A Dynamo worker that computes nothing, for `benchmarks.gateway`; runs where `ai-dynamo` is.

Imports nothing of this project: that environment does not have it. As `benchmarks.openai_worker`,
a prompt that finds all slots taken waits.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo._core import WorkerType
from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker

WORD = 300


class Engine:
    """Made-up tokens at a pace."""

    def __init__(self) -> None:
        self.prefill_s, self.step_s = 0.0, 0.0
        self._turn = asyncio.Semaphore(1)

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """One request's tokens."""
        left = request["stop_conditions"]["max_tokens"] or 16
        if self.prefill_s:
            async with self._turn:
                await asyncio.sleep(self.prefill_s)
        while left > 1:
            yield {"token_ids": [WORD]}
            left -= 1
            await asyncio.sleep(self.step_s)
        yield {"token_ids": [WORD], "finish_reason": "length"}

    async def follow_commands(self) -> None:
        """Behaves as standard input says, until it ends."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            wish = {"prefill_s": 0.0, "step_s": 0.0, **json.loads(line)}
            self.prefill_s, self.step_s = wish["prefill_s"], wish["step_s"]
            sys.stdout.write("changed\n")
            sys.stdout.flush()


@dynamo_worker()  # type: ignore[untyped-decorator]
async def worker(runtime: DistributedRuntime) -> None:
    """Serves until it is stopped."""
    folder, name = sys.argv[1:]
    endpoint = runtime.endpoint("bench.backend.generate")
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        folder,
        name,
        worker_type=WorkerType.Aggregated,
    )
    engine = Engine()
    commands = asyncio.create_task(engine.follow_commands())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await endpoint.serve_endpoint(engine.generate)
    commands.cancel()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(worker())
