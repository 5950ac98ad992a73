"""How long a stream pauses when its gateway dies: with a journal, and with workers that go on.

Streams run through one of two gateways, which is killed; their clients go on at the other one with
`Last-Event-ID`. Either the workers drop what a dead gateway asked for, as ours do, and the tokens
so far are a prompt again; or they go on for some seconds, and what they generated meanwhile is
there when the other gateway asks. Both ways need the journal for the request.

    python -m benchmarks.gateway_death --rounds 5

Tests: tests/unit/benchmarks/test_gateway_death.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chat_prompts import Messages, chats
from benchmarks.gateway_load import Loader
from benchmarks.gateway_traffic import Request
from benchmarks.our_mesh import MODEL, OurMesh
from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from kvmesh.core.types import Endpoint

STREAMS, NUM_TOKENS, DIES_AFTER = 32, 300, 40
STEP_S, SLOTS, GOES_ON_S = 0.02, 4, 5.0
PREFILLS_S = (0.02, 0.2)
START_S = 300.0
WAYS = {"the journal alone": 0.0, f"workers go on for {GOES_ON_S:g} s": GOES_ON_S}

NOTES = (
    f"{STREAMS} streams of {NUM_TOKENS} tokens, {1000 * STEP_S:g} ms apart; their gateway is killed"
    f" when each has {DIES_AFTER} events; a prompt takes as long as the row says, {SLOTS} at a"
    " time\n"
    "- pause: from the last event before the kill to the first one after it, at the client, which"
    " asks again at once\n"
    "- wrong: streams whose text is not that of one that nobody disturbed\n"
    "- for nobody: tokens that a stream's worker generates if its client does not come back"
).split("\n- ")


@dataclass(slots=True)
class Stream:
    """One client's stream, over all gateways.

    Attributes:
        num_events: with text.
        pause_s: longest time between two of them.
        is_going: it has come as far as its gateway lives.
    """

    text: str = ""
    last_id: str = ""
    num_events: int = 0
    is_done: bool = False
    pause_s: float = 0.0
    is_going: asyncio.Event = field(default_factory=asyncio.Event)
    _last_at: float = 0.0

    def take(self, line: str) -> None:
        """A line of the answer."""
        name, _, value = line.rstrip("\n").partition(": ")
        if name == "id":
            self.last_id = value
        elif name == "data" and value == "[DONE]":
            self.is_done = True
        elif name == "data":
            choices = json.loads(value)["choices"]
            if text := (choices[0]["delta"].get("content") if choices else ""):
                now = time.perf_counter()
                if self.num_events:
                    self.pause_s = max(self.pause_s, now - self._last_at)
                self.text, self._last_at = self.text + text, now
                self.num_events += 1
                if self.num_events == DIES_AFTER:
                    self.is_going.set()


async def read(
    session: aiohttp.ClientSession, endpoint: Endpoint, messages: Messages, stream: Stream
) -> None:
    """Reads a stream, or what follows of it, until it ends or its gateway dies."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"Last-Event-ID": stream.last_id}
    try:
        url = f"http://{endpoint}/v1/chat/completions"
        async with session.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                stream.take(line.decode())
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
        return


class DeathMesh:
    """A mesh whose gateways are killed."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._mesh = OurMesh(stack, folder)
        self._worker = self._mesh.worker("worker", "roles")
        self._num_gateways = 0

    async def ready(self) -> None:
        """Waits until the worker is there."""
        await self._worker.line()

    async def behave(self, **behaviour: float) -> None:
        """Has workers behave so from now on."""
        self._worker.tell(behaviour)
        await self._worker.line()

    async def kill_one(self, prompts: Sequence[Messages]) -> list[Stream]:
        """Streams through a gateway that is killed, and through another one to their ends."""
        endpoints, processes = [], []
        for _ in range(2):
            self._num_gateways += 1
            process, endpoint = self._mesh.gateway(str(self._num_gateways))
            endpoints.append(endpoint)
            processes.append(process)
        for process, endpoint in zip(processes, endpoints, strict=True):
            loader, hello = Loader(endpoint), [{"role": "user", "content": "hello"}]
            payload = Request(1, stream=False).to_bytes(endpoint, hello)
            await loader.until_ok(payload, partial(getattr, process, "running"), START_S)
            loader.close()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = [Stream() for _ in prompts]

            async def client(messages: Messages, stream: Stream) -> None:
                for endpoint in endpoints:
                    await read(session, endpoint, messages, stream)

            async def kill() -> None:
                await asyncio.gather(*(stream.is_going.wait() for stream in streams))
                processes[0].kill()

            pairs = zip(prompts, streams, strict=True)
            await asyncio.gather(kill(), *(client(*pair) for pair in pairs))
            await self.behave()  # as fast as possible: what they had to say
            undisturbed = [Stream() for _ in prompts]
            again = zip(prompts, undisturbed, strict=True)
            await asyncio.gather(*(read(session, endpoints[1], *pair) for pair in again))
        for stream, other in zip(streams, undisturbed, strict=True):
            assert other.is_done, "nobody disturbed it"
            stream.is_done &= stream.text == other.text
        processes[1].stop()
        return streams


def row_of(way: str, prefill_s: float, rounds: Sequence[Sequence[Stream]]) -> Row:
    """One way's row."""
    pauses = [1000 * stream.pause_s for streams in rounds for stream in streams]
    cuts = statistics.quantiles(pauses, n=100)
    return {
        "way": way,
        "prompt ms": round(1000 * prefill_s),
        "pause p50 ms": round(cuts[49]),
        "pause p99 ms": round(cuts[98]),
        "wrong": sum(not stream.is_done for streams in rounds for stream in streams),
        "for nobody, tokens": round(WAYS[way] / STEP_S),
    }


async def run(num_rounds: int) -> list[Row]:
    """The rows; the ways take turns."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder, ExitStack() as stack:
        mesh = DeathMesh(stack, Path(folder))
        await mesh.ready()
        cases = [(way, prefill_s) for prefill_s in PREFILLS_S for way in WAYS]
        found: dict[tuple[str, float], list[list[Stream]]] = {case: [] for case in cases}
        drawn = (messages for _, messages in chats(num_rounds * len(cases) * STREAMS, seed=1))
        for _ in range(num_rounds):
            for case in cases:
                way, prefill_s = case
                await mesh.behave(
                    step_s=STEP_S, prefill_s=prefill_s, slots=SLOTS, goes_on_s=WAYS[way]
                )
                found[case].append(await mesh.kill_one(list(islice(drawn, STREAMS))))
    return [row_of(*case, rounds) for case, rounds in found.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="deaths for each way")
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway_death.json")
    arguments = parser.parse_args(argv)
    rows = asyncio.run(run(arguments.rounds))
    num_wrong = float(sum(row["wrong"] for row in rows))
    targets = [Target("streams that lost or repeated text", num_wrong, 0.0, at_most=True)]
    result = document(rows, targets, 1, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
