"""A client of the public HTTP API that keeps what tests look at: tokens, headers, waiting time."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from tests.mesh_processes import MODEL

TIMEOUT_S = 45.0


@dataclass
class Choice:
    """One choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)

    def add(self, body: Mapping[str, Any]) -> None:
        """Adds a whole choice or a piece of a stream."""
        self.token_ids += body.get("token_ids") or []
        self.text += body["text"]
        self.finish_reason = body["finish_reason"] or self.finish_reason
        logprobs = body["logprobs"]
        if logprobs is not None:
            self.logprobs += logprobs["token_logprobs"]
            self.top_logprobs += logprobs["top_logprobs"]


@dataclass
class Answer:
    """The answer to one request.

    Attributes:
        waited_s: from sending to the status line, which comes with the first tokens of a stream.
        error: OpenAI's error object, from the body or from within a stream.
    """

    status: int
    headers: Mapping[str, str]
    waited_s: float
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def add(self, body: Mapping[str, Any]) -> None:
        """Adds a body or a chunk."""
        self.error = body.get("error", self.error)
        self.usage = body.get("usage") or self.usage
        for choice in body.get("choices", ()):
            self.choices.setdefault(choice["index"], Choice()).add(choice)

    @property
    def ok(self) -> bool:
        """Whether it was answered to the end."""
        return self.status == 200 and self.error is None

    @property
    def only(self) -> Choice:
        """The choice, where there is one."""
        assert self.ok, f"{self.status}: {self.error}"
        (choice,) = self.choices.values()
        return choice

    @property
    def token_ids(self) -> list[int]:
        """The tokens, where there is one choice."""
        return self.only.token_ids

    @property
    def cached_tokens(self) -> int:
        """What usage says was cached."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def prefill_worker(self) -> str:
        """Who computed the prompt."""
        return self.headers["x-kvmesh-prefill-worker"]

    @property
    def decode_worker(self) -> str:
        """Who generated, when the answer began."""
        return self.headers["x-kvmesh-decode-worker"]


class Stream:
    """A stream that is being read."""

    def __init__(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        self._response = response
        self.answer = answer

    async def read(self, num_tokens: int) -> None:
        """Reads until so many tokens came."""
        while sum(len(choice.token_ids) for choice in self.answer.choices.values()) < num_tokens:
            assert await self._read_one(), f"the stream ended before: {self.answer.error}"

    async def finish(self) -> Answer:
        """Reads to the end."""
        while await self._read_one():
            pass
        return self.answer

    async def _read_one(self) -> bool:
        async for line in self._response.content:
            if line == b"data: [DONE]\n":
                return False
            if line.startswith(b"data: "):
                self.answer.add(json.loads(line[6:]))
                return True
        raise AssertionError("the connection closed without [DONE]")


class ApiClient:
    """Asks for completions of token ids; greedy unless told otherwise."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        # Every request has a connection of its own, as many clients would.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(TIMEOUT_S),
        )

    async def __aenter__(self) -> ApiClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def complete(
        self, prompt: list[int], *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> Answer:
        """One request, answered as a whole."""
        async with self._post(prompt, headers, body) as (response, answer):
            answer.add(await response.json())
        return answer

    @asynccontextmanager
    async def stream(
        self, prompt: list[int], *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> AsyncIterator[Stream]:
        """One streamed request; leaving the block before the end is a client that goes away."""
        body = {"stream": True, "stream_options": {"include_usage": True}, **body}
        async with self._post(prompt, headers, body) as (response, answer):
            if answer.status != 200:
                answer.add(await response.json())
            yield Stream(response, answer)

    async def streamed(
        self, prompt: list[int], *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> Answer:
        """One streamed request, read to the end."""
        async with self.stream(prompt, headers=headers, **body) as stream:
            return await stream.finish() if stream.answer.status == 200 else stream.answer

    @asynccontextmanager
    async def _post(
        self, prompt: list[int], headers: Mapping[str, str] | None, body: dict[str, Any]
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Answer]]:
        content = {
            "model": MODEL,
            "prompt": prompt,
            "temperature": 0,
            "return_token_ids": True,
            **body,
        }
        started = time.monotonic()
        async with self._session.post(self._url, json=content, headers=headers) as response:
            yield response, Answer(response.status, response.headers, time.monotonic() - started)


def placed(placement: str) -> dict[str, str]:
    """Headers that ask for a placement."""
    return {"x-kvmesh-placement": placement}
