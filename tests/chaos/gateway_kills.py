"""`make chaos-gateway KILLS=n`: two gateways of two processes each under streams, and processes,
parents and whole ports are killed. Every stream ends as in a mesh that nobody disturbs: no token is
lost or repeated, and its text is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from kvmesh.client import AsyncClient, Client, RetryPolicy
from kvmesh.client import calls as client_calls
from kvmesh.core.errors import KvMeshError
from tests.chaos.load import a_prompt
from tests.mesh_child import Child
from tests.mesh_processes import MODEL, Flags, Mesh, fake_tokens
from tests.redis_server import redis_process
from tests.waiting import until

NUM_CLIENTS = 48
NUM_CASES = 24
MOVING = 0.5
"""Tokens per stream between two kills, at least."""
PATIENT = RetryPolicy(attempts=60, resumes=60, max_s=2.0)

_WORKERS: Flags = {"engine.fake-step-s": 0.01, "worker.prefill-slots": 4, "worker.decode-slots": 32}


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its only right answer.

    Attributes:
        scored: what is said of two choices with log-probabilities; the first one's are the tokens.
    """

    prompt: tuple[int, ...]
    seed: int
    token_ids: tuple[int, ...]
    text: str = ""
    scored: Scored | None = None


@dataclass(slots=True)
class Scored:
    """All that a stream of several choices with log-probabilities said, without what varies."""

    choices: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)

    def add(self, event: dict[str, Any]) -> None:
        """An event came."""
        for choice in event["choices"]:
            index, scores = choice["index"], choice["logprobs"] or {}
            said = self.choices.setdefault(index, {"text": []})
            said["text"] += choice["text"]
            for name, values in {**scores, "ids": choice.get("token_ids", [])}.items():
                said.setdefault(name, []).extend(values)
            if choice["finish_reason"]:
                assert index not in self.finishes, "it ended twice"
                self.finishes[index] = choice["finish_reason"]
        if not event["choices"]:
            usage = event["usage"]
            assert self.usage == (0, 0), "usage came twice"
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]


@dataclass(slots=True)
class Streams:
    """Clients that ask one request after the other, and what came of it.

    Attributes:
        kinds: streams that ended, by who asked.
        num_cuts: how often a stream was cut and went on.
        wrong: what was not as it had to be.
        num_tokens: that came so far.
        longest_pause_s: between two tokens.
    """

    cases: Sequence[Case]
    kinds: Counter[str] = field(default_factory=Counter)
    num_cuts: int = 0
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0
    longest_pause_s: float = 0.0
    stopping: bool = False

    async def more(self, count: int) -> None:
        """Waits until so many more tokens came, or something was wrong."""
        goal = self.num_tokens + count
        await until(lambda: self.num_tokens >= goal or self.wrong, f"{count} more tokens", 120)

    def judge(self, kind: str, case: Case, told: Told) -> None:
        """A stream has ended."""
        self.kinds[kind] += 1
        self.longest_pause_s = max(self.longest_pause_s, told.longest_pause_s)
        if tuple(told.token_ids) != case.token_ids or told.text != case.text:
            self.wrong.append(f"{kind}, seed {case.seed}: {told.text!r}, not {case.text!r}")


@dataclass(slots=True)
class Told:
    """What one stream has said."""

    streams: Streams
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    longest_pause_s: float = 0.0
    scored: Scored | None = None
    _at: float = 0.0

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        """A piece came."""
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - self._at if self._at else 0.0)
        self._at = now
        self.text += text
        self.token_ids += token_ids
        self.streams.num_tokens += len(token_ids)


def _options(case: Case) -> dict[str, Any]:
    return {
        "seed": case.seed,
        "temperature": 1.0,
        "max_tokens": len(case.token_ids),
        "ignore_eos": True,
    }


async def _by_sdk(client: AsyncClient, case: Case, told: Told) -> None:
    async for delta in client.stream(list(case.prompt), **_options(case)):
        told.add(delta.text, delta.token_ids)


async def _by_blocking_sdk(client: Client, case: Case, told: Told) -> None:
    def read() -> None:
        for delta in client.stream(list(case.prompt), **_options(case)):
            told.add(delta.text, delta.token_ids)

    await asyncio.to_thread(read)


async def _by_events(urls: list[str], case: Case, told: Told) -> None:
    """Any client of server-sent events that keeps to their standard."""
    async for event in _events(urls, case, told, {}):
        (choice,) = event["choices"]
        told.add(choice["text"], choice.get("token_ids", []))


async def _by_scored_events(urls: list[str], case: Case, told: Told) -> None:
    """As `_by_events`, with all that makes later events depend on earlier ones."""
    scored = Scored()
    async for event in _events(urls, case, told, SCORED):
        scored.add(event)
        for choice in event["choices"]:
            if not choice["index"]:
                told.add(choice["text"], choice.get("token_ids", []))
    assert case.scored is None or _is_near(asdict(scored), asdict(case.scored)), (
        f"{scored}, not {case.scored}"
    )
    told.scored = scored


def _is_near(said: Any, meant: Any) -> bool:
    """Whether all is the same; log-probabilities are rounded by who is in the same step."""
    if isinstance(meant, float):
        return math.isclose(said, meant, abs_tol=1e-4)
    if isinstance(meant, dict):
        return said.keys() == meant.keys() and all(_is_near(said[key], meant[key]) for key in meant)
    if isinstance(meant, list):
        return len(said) == len(meant) and all(map(_is_near, said, meant))
    return bool(said == meant)


SCORED: dict[str, Any] = {"n": 2, "logprobs": 2, "stream_options": {"include_usage": True}}


async def _events(
    urls: list[str], case: Case, told: Told, fields: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The events of one stream, over any number of connections; `urls` ends with the last one."""
    body = {
        "model": MODEL,
        "prompt": list(case.prompt),
        "stream": True,
        "return_token_ids": True,
        **_options(case),
        **fields,
    }
    last_id, pauses = "", itertools.repeat(0.2, 300)
    while True:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last_id}
        with suppress(aiohttp.ClientError, ConnectionError):
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{urls[0]}/v1/completions", json=body, headers=headers) as response,
            ):
                if response.status != 503:
                    assert response.status == 200, (response.status, await response.text())
                    event_id = last_id
                    async for line in response.content:
                        name, _, value = line.decode().partition(":")
                        if name == "id":
                            event_id = value.strip()
                        elif name == "data" and line.endswith(b"\n"):
                            if value.strip() == "[DONE]":
                                return
                            event = json.loads(value)
                            if "error" in event:
                                break
                            last_id = event_id
                            yield event
        told.streams.num_cuts += bool(told.token_ids)
        assert last_id or not told.token_ids, "tokens came without an id"
        urls.reverse()
        await asyncio.sleep(next(pauses))


class Gateways:
    """The gateways of a mesh, which somebody starts again when they end."""

    def __init__(self, mesh: Mesh, names: Sequence[str]) -> None:
        self._mesh = mesh
        self._names = names
        self.done: Counter[str] = Counter()

    @property
    def children(self) -> list[Child]:
        """Their parents."""
        return [self._mesh[name] for name in self._names]

    @property
    def targets(self) -> str:
        """Addresses for the SDK."""
        return ",".join(child.address for child in self.children)

    @property
    def urls(self) -> list[str]:
        """Where HTTP is."""
        return [f"http://{child.address_of('http_serving')}" for child in self.children]

    async def keep(self) -> None:
        """Starts those again that ended, until cancelled."""
        while True:
            for child in self.children:
                if not child.running:
                    child.start()
            await asyncio.sleep(0.05)

    async def kill(self, kind: str, draw: random.Random) -> None:
        """Kills a process, a parent or a whole port, of a gateway while another one serves."""
        await until(lambda: sum(map(serves, self.children)) > 1, "two gateways serve", 120)
        child = draw.choice([each for each in self.children if serves(each)])
        pids = processes_of(child)
        victims = {"process": [draw.choice(pids)], "parent": [], "port": pids}[kind]
        for pid in victims:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        if kind != "process":
            child.kill()
        self.done[kind] += 1


def processes_of(child: Child) -> list[int]:
    """The processes of a gateway that live."""
    started = [each["pid"] for each in child.events() if each["event"] == "gateway_process_started"]
    return [pid for pid in started if psutil.pid_exists(pid)]


def serves(child: Child) -> bool:
    """Whether all processes of a gateway serve."""
    if not child.running:
        return False
    serving = sum(event["event"] == "serving" for event in child.events())
    started = sum(event["event"] == "gateway_process_started" for event in child.events())
    return started == serving and len(processes_of(child)) == child.flags["http.processes"]


Alone = Callable[[Sequence[int], int, int], list[int]]
"""Returns the tokens of a single engine, given a prompt, their number and the seed."""


def fake_alone(prompt: Sequence[int], count: int, seed: int) -> list[int]:
    """See `Alone`."""
    return fake_tokens(list(prompt), count, temperature=1.0, seed=seed)


async def learn(
    gateways: Gateways, seed: int, shortest: int, longest: int, alone: Alone = fake_alone
) -> list[Case]:
    """Requests, and what a mesh that nobody disturbs says; an engine alone says the same."""
    draw = random.Random(seed)
    cases = []
    for number in range(1, NUM_CASES + 1):  # over gRPC, 0 is a random seed
        prompt, count = a_prompt(draw), draw.randint(shortest, longest)
        expected = tuple(alone(prompt, count, number))
        cases.append(Case(tuple(prompt), number, expected))
    async with AsyncClient(gateways.targets) as client:

        async def learnt(case: Case) -> Case:
            generation = await client.generate(list(case.prompt), **_options(case))
            assert generation.token_ids == case.token_ids
            told = Told(Streams([]))
            await _by_scored_events(gateways.urls, case, told)
            scored = told.scored
            assert scored is not None
            said = [scored.choices[index]["ids"] for index in range(2)]
            assert said == [
                alone(case.prompt, len(case.token_ids), seed) for seed in (case.seed, case.seed + 1)
            ]
            assert scored.usage == (len(case.prompt), sum(map(len, said)))
            return replace(case, text=generation.text, scored=scored)

        return await asyncio.gather(*map(learnt, cases))


async def one_client(number: int, streams: Streams, targets: str, urls: list[str]) -> None:
    """Asks until all stop; of ten clients seven have the SDK, one its twin, two HTTP alone."""
    draw = random.Random(f"client {number}")
    urls = draw.sample(urls, len(urls))
    kind = {0: "blocking SDK", 1: "events", 2: "scored events"}.get(number % 10, "SDK")
    async with AsyncClient(targets, retry=PATIENT) as sdk:
        with Client(targets, retry=PATIENT) as blocking:
            asks: dict[str, Callable[[Case, Told], Awaitable[None]]] = {
                "SDK": partial(_by_sdk, sdk),
                "blocking SDK": partial(_by_blocking_sdk, blocking),
                "events": partial(_by_events, urls),
                "scored events": partial(_by_scored_events, urls),
            }
            while not streams.stopping:
                case, told = draw.choice(streams.cases), Told(streams)
                try:
                    await asks[kind](case, told)
                except (KvMeshError, AssertionError) as error:
                    streams.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                else:
                    streams.judge(kind, case, told)


@asynccontextmanager
async def at_work(streams: Streams, gateways: Gateways, count: int) -> AsyncIterator[None]:
    """So many streams at a time; at the end all of them are over."""
    targets, urls = gateways.targets, gateways.urls
    async with asyncio.TaskGroup() as clients:
        for number in range(count):
            clients.create_task(one_client(number, streams, targets, urls))
        try:
            yield
        finally:
            streams.stopping = True


def count_cuts(streams: Streams) -> Callable[[], None]:
    """Counts streams that the SDK goes on with; what it gives back ends that."""
    call: Any = client_calls.GenerationCall
    wait_after = call.wait_after

    def counted(self: Any, error: Any) -> float:
        wait_s: float = wait_after(self, error)
        streams.num_cuts += self._delivered
        return wait_s

    call.wait_after = counted
    return lambda: setattr(call, "wait_after", wait_after)


@asynccontextmanager
async def two_gateways(
    folder: Path, num_processes: int = 2
) -> AsyncIterator[tuple[Mesh, Gateways]]:
    """A mesh with them; at the end nothing is held anywhere and all exit well."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_process(folder))
        gateway = {"http.processes": 2, "redis.url": redis.url}
        flags = {"prefill": _WORKERS, "decode": _WORKERS, "gateway": gateway}
        mesh = Mesh(folder, flags=flags, is_forked=True)
        mesh.redis = redis
        stack.callback(mesh.print_logs)
        stack.callback(mesh.reap)
        await mesh.start(2, 2)
        own = {"http.port": 0, "server.port": 0, "telemetry.trace.target": folder / "other.jsonl"}
        await mesh.add("other", "gateway", {**mesh["gateway"].flags, **own}, sticky=True).ready()
        gateways = Gateways(mesh, ["gateway", "other"])
        await until(lambda: all(map(serves, gateways.children)), "all serve", 60)
        yield mesh, gateways
        await until(lambda: all(map(serves, gateways.children)), "all serve again", 120)
        await mesh.idle()
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes


async def chaos(
    gateways: Gateways, streams: Streams, num_kills: int, num_clients: int, seed: int
) -> None:
    """Kills, each when most streams have gone on since the one before."""
    draw = random.Random(f"kills {seed}")
    kinds = itertools.cycle(["process", "parent", "process", "port"])
    stop_counting = count_cuts(streams)
    keeper = asyncio.create_task(gateways.keep())
    try:
        async with at_work(streams, gateways, num_clients):
            for number, kind in zip(range(num_kills), kinds, strict=False):
                await streams.more(round(MOVING * num_clients * draw.randint(1, 20)))
                if streams.wrong:
                    return
                await gateways.kill(kind, draw)
                if number % 10 == 9:
                    print(told_of(gateways, streams), flush=True)
            await streams.more(num_clients)
    finally:
        stop_counting()
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        for child in gateways.children:
            if not child.running:
                child.start()


def told_of(gateways: Gateways, streams: Streams) -> str:
    """One line of what happened so far."""
    return (
        f"{gateways.done.total()} kills {dict(gateways.done)}: {streams.kinds.total()} streams "
        f"{dict(streams.kinds)}, {streams.num_cuts} cut and gone on with, {streams.num_tokens} "
        f"tokens, {len(streams.wrong)} wrong; longest pause {streams.longest_pause_s:.1f} s"
    )


async def run(num_kills: int, num_clients: int, seed: int) -> int:
    """Starts a mesh and kills its gateways; 1 if a stream was not as it had to be."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-chaos-") as folder:
        async with two_gateways(Path(folder)) as (_, gateways):
            streams = Streams(await learn(gateways, seed, 100, 400))
            await chaos(gateways, streams, num_kills, num_clients, seed)
    for line in streams.wrong[:10]:
        print(f"WRONG {line}")
    print(told_of(gateways, streams))
    return 1 if streams.wrong else 0


def main() -> int:
    """Reads the arguments; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return asyncio.run(run(options.kills, options.clients, options.seed))


if __name__ == "__main__":
    sys.exit(main())
