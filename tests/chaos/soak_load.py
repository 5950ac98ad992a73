"""Clients of the soak: they ask, compare with the undisturbed answer, and count how it ended."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.chaos.soak_cases import Case, Said, as_text

_HANGS_S = 120.0
_PLACEMENTS = ("", "", "aggregated", "disaggregated")


@dataclass
class Outcome:
    """How one request ended.

    Attributes:
        kind: ok, cancelled, refused, lost (an honest error within a stream), or wrong.
        detail: what is wrong.
    """

    kind: str
    detail: str = ""


@dataclass
class SoakClients:
    """Clients that ask one request after the other.

    Attributes:
        known: requests and what an undisturbed mesh says.
        outcomes: requests by how they ended.
        sent: requests; each has one outcome when nobody asks.
    """

    url: str
    known: list[tuple[Case, Said]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    sent: int = 0
    stopping: bool = False

    async def learn(self, case: Case) -> Said:
        """What the mesh says while nothing disturbs it."""
        async with self._session() as session:
            said = Said()
            outcome = await self._whole(session, case.path, dict(case.body), {}, said)
        assert outcome.kind == "ok", f"{outcome}: {as_text(case)}"
        return said

    async def run(self, number: int, seed: int) -> None:
        """Asks until `stopping`."""
        draw = random.Random(f"client {number} {seed}")
        async with self._session() as session:
            while not self.stopping:
                case, expected = draw.choice(self.known)
                self.sent += 1
                outcome = await self._ask(session, case, expected, draw)
                self.outcomes[outcome.kind] += 1
                if outcome.kind == "wrong":
                    self.wrong.append(f"{outcome.detail}\n  {as_text(case)}")

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_HANGS_S))

    async def _ask(
        self, session: aiohttp.ClientSession, case: Case, expected: Said, draw: random.Random
    ) -> Outcome:
        headers = {"x-slo-ttft-ms": "30000"}
        placement = draw.choice(_PLACEMENTS)
        if placement:
            headers["x-kvmesh-placement"] = placement
        leaves_after = draw.randrange(30) if draw.random() < 0.15 else None
        stream = draw.random() < 0.7
        said = Said()
        try:
            if stream:
                body = {**case.body, "stream": True}
                outcome = await self._streamed(
                    session, case.path, body, headers, said, leaves_after
                )
            else:
                outcome = await self._whole(session, case.path, dict(case.body), headers, said)
        except (aiohttp.ClientError, TimeoutError) as error:
            return Outcome("wrong", f"{type(error).__name__}: {error} ({headers}, {stream=})")
        return _judged(outcome, said, expected, f"{headers}, {stream=}")

    async def _whole(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        said: Said,
    ) -> Outcome:
        async with session.post(f"{self.url}{path}", json=body, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                return _refused(response, answer)
            said.add(answer)
            return Outcome("ok")

    async def _streamed(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        said: Said,
        leaves_after: int | None,
    ) -> Outcome:
        async with session.post(f"{self.url}{path}", json=body, headers=headers) as response:
            if response.status != 200:
                return _refused(response, await response.json())
            count = 0
            async for line in response.content:
                if count == leaves_after:
                    return Outcome("cancelled")
                if line == b"data: [DONE]\n":
                    return Outcome("ok")
                if line.startswith(b"data: "):
                    count += 1
                    event = json.loads(line[6:])
                    if "error" in event:
                        return Outcome("lost", str(event["error"]))
                    said.add(event)
            return Outcome("wrong", f"the stream ended without [DONE] ({headers})")

    @asynccontextmanager
    async def at_work(self, count: int, seed: int) -> AsyncIterator[None]:
        """So many clients ask; at the end all their requests are over."""
        self.stopping = False
        async with asyncio.TaskGroup() as clients:
            for number in range(count):
                clients.create_task(self.run(number, seed))
            try:
                yield
            finally:
                self.stopping = True


def _refused(response: aiohttp.ClientResponse, answer: dict[str, Any]) -> Outcome:
    error = answer.get("error")
    honest = response.status == 503 and "Retry-After" in response.headers and error
    if honest or response.status in (429, 504):
        return Outcome("refused")
    return Outcome("wrong", f"status {response.status}: {error}")


def _judged(outcome: Outcome, said: Said, expected: Said, how: str) -> Outcome:
    """The outcome, wrong where what was said is not what an undisturbed mesh says."""
    if outcome.kind == "ok":
        if said.choices != expected.choices:
            return Outcome("wrong", f"{how}\n  said {said}\n  not  {expected}")
        if said.ends != len(expected.choices):
            return Outcome("wrong", f"{how}: choices ended {said.ends} times")
    elif outcome.kind in ("cancelled", "lost") and not said.begins(expected):
        return Outcome("wrong", f"{outcome} {how}\n  said {said}\n  not  {expected}")
    return outcome
