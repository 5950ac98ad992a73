"""Sends the requests of a benchmark and records the arrival times of their answers.

Tests: tests/unit/cli/test_bench_load.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvmesh.cli.bench_metrics import Outcome, RequestRecord
from kvmesh.cli.https import trust
from kvmesh.cli.stack_state import no_gateway
from kvmesh.core.errors import KvMeshError

_REFUSED = (429, 503)
_DONE = "[DONE]"

_WORDS = """
class def return import module value string object list tuple function method file name path error
raise yield with open read write index number float integer sequence mapping
""".split()  # noqa: SIM905 - a list of words reads best as text


@dataclass(frozen=True, slots=True)
class Load:
    """The requests to send.

    Attributes:
        rate: requests per second, Poisson arrivals; 0 sends all at once.
        prompts: `tokens` (random ids below `vocab_size`) or `text`.
        concurrency: maximum number of requests in flight; 0 is no limit. The wait for this limit is
            not part of the latency, as in other benchmarks.
        tls_ca: file with the CA of an https:// URL; empty: the CAs of this machine.
    """

    url: str
    model: str
    num_requests: int
    rate: float
    input_tokens: int
    output_tokens: int
    seed: int
    prompts: str = "tokens"
    vocab_size: int = 4000
    concurrency: int = 0
    temperature: float = 0.0
    timeout_s: float = 600.0
    api_key: str = field(default="", repr=False)
    tls_ca: str = ""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, and the time to send it in seconds from the start."""

    due_s: float
    prompt: str | list[int]
    seed: int


def plan_load(load: Load) -> list[PlannedRequest]:
    """Returns the requests of a run; the same seed gives the same run."""
    rng = random.Random(load.seed)
    planned, due_s = [], 0.0
    for index in range(load.num_requests):
        if index and load.rate > 0:
            due_s += rng.expovariate(load.rate)
        planned.append(PlannedRequest(due_s, _prompt(load, rng), rng.getrandbits(31)))
    return planned


def _prompt(load: Load, rng: random.Random) -> str | list[int]:
    if load.prompts == "text":
        return " ".join(rng.choice(_WORDS) for _ in range(load.input_tokens))
    lowest = min(16, load.vocab_size - 1)  # lower ids are special tokens in most vocabularies
    return [rng.randrange(lowest, load.vocab_size) for _ in range(load.input_tokens)]


@dataclass(slots=True)
class _Seen:
    """The received part of one stream."""

    times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    done: bool = False
    error: str = ""

    def add(self, data: str, now_s: float) -> None:
        if data == _DONE:
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"].get("message", event["error"]))
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.end_s = now_s
            ended = choice.get("finish_reason") is not None
            self.finished |= ended
            # A final chunk without text is no token.
            if choice.get("text") or not ended or not self.times_s:
                self.times_s.append(now_s)


class LoadGenerator:
    """Runs a load against the OpenAI completions API."""

    def __init__(self, load: Load, on_done: Callable[[RequestRecord], None]) -> None:
        """`on_done` is called with the record of each request when it ends."""
        self._load = load
        self._on_done = on_done
        self._turn = asyncio.Semaphore(load.concurrency) if load.concurrency else None

    async def run(self) -> tuple[list[RequestRecord], float]:
        """Sends all requests; returns one record per request, and the total seconds."""
        connector = aiohttp.TCPConnector(limit=0, ssl=trust(self._load.tls_ca))
        timeout = aiohttp.ClientTimeout(total=self._load.timeout_s)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=_headers(self._load.api_key)
        ) as session:
            started_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._send(session, request, started_s))
                    for request in plan_load(self._load)
                ]
            return [task.result() for task in tasks], time.monotonic() - started_s

    async def _send(
        self, session: aiohttp.ClientSession, request: PlannedRequest, started_s: float
    ) -> RequestRecord:
        await asyncio.sleep(started_s + request.due_s - time.monotonic())
        async with AsyncExitStack() as stack:
            if self._turn is not None:
                await stack.enter_async_context(self._turn)
            record = await self._request(session, request)
        self._on_done(record)
        return record

    async def _request(
        self, session: aiohttp.ClientSession, request: PlannedRequest
    ) -> RequestRecord:
        body = {
            "model": self._load.model,
            "prompt": request.prompt,
            "max_tokens": self._load.output_tokens,
            "temperature": self._load.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.monotonic()
        seen = _Seen()
        try:
            async with session.post(f"{self._load.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    reason = f"{response.status}: {(await response.text())[:500]}"
                    outcome: Outcome = "refused" if response.status in _REFUSED else "error"
                    return RequestRecord(outcome, sent_s, error=reason)
                async for data in _events(response.content):
                    seen.add(data, time.monotonic())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            seen.error = seen.error or repr(error)
        return self._record(request, sent_s, seen)

    def _record(self, request: PlannedRequest, sent_s: float, seen: _Seen) -> RequestRecord:
        if not (seen.finished and seen.done) or seen.error:
            reason = seen.error or "the stream ended before the generation did"
            return RequestRecord("error", sent_s, error=reason)
        return RequestRecord(
            outcome="completed",
            sent_s=sent_s,
            token_times_s=tuple(seen.times_s),
            end_s=seen.end_s,
            input_tokens=int(seen.usage.get("prompt_tokens", len(request.prompt))),
            output_tokens=int(seen.usage.get("completion_tokens", len(seen.times_s))),
        )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Yields the data of server-sent events, one line each."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def find_model(url: str, api_key: str = "", tls_ca: str = "") -> str:
    """Returns the name of the first served model.

    Args:
        tls_ca: as in `Load`.

    Raises:
        KvMeshError: no gateway answers, or it serves no model.
    """
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=trust(tls_ca)),
                timeout=aiohttp.ClientTimeout(total=10),
            ) as session,
            session.get(f"{url}/v1/models", headers=_headers(api_key)) as response,
        ):
            if response.status in (401, 403):
                wrong = "does not accept the API key in" if api_key else "asks for an API key:"
                raise KvMeshError(f"{url} {wrong} KVMESH_API_KEY")
            response.raise_for_status()
            models: Sequence[dict[str, Any]] = (await response.json())["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise KvMeshError(no_gateway(url, error)) from error
    except (ValueError, LookupError, TypeError) as error:
        raise KvMeshError(f"{url}/v1/models names no model") from error
