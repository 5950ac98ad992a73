"""One conversation over the OpenAI HTTP API: its messages, and the next answer as a stream.

Tests: tests/unit/cli/test_chat_api.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from kvmesh.cli.stack_state import no_gateway
from kvmesh.core.errors import KvMeshError

_DATA, _ID, _END = b"data:", b"id:", b"\n"
_NO_KEY, _GONE = 401, 410
_LOST_CODES = frozenset({"draining", "LostError"})
"""Error codes within a stream after which another gateway may resume it."""

GO_ON_S = 60.0
"""Seconds without a new event for which a cut stream is requested again."""
_PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0)


class _CutError(Exception):
    """The stream broke off, or did not begin; the message says why."""


class ChatError(KvMeshError):
    """The server did not answer, or refused."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, for the next request.

    Attributes:
        system: system message before all others; empty: none.
        turns: messages of user and assistant.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Returns all messages in order."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def ask(self, text: str) -> None:
        """Adds a message of the user."""
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """Adds the model's answer, which may have been stopped."""
        self.turns.append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Removes the last question and its answer; returns False if there is none."""
        while self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        return bool(self.turns) and bool(self.turns.pop())

    def reset(self) -> None:
        """Removes all messages except the system message."""
        self.turns.clear()


class Piece(NamedTuple):
    """A further part of an answer."""

    thinking: str
    text: str


@dataclass(slots=True)
class Answer:
    """An answer with its token counts and times; it grows while it streams.

    Attributes:
        thinking: reasoning text before the answer.
        ttft_s: seconds from sending to the first piece of thinking or text.
        worker: worker that generated it; empty if the server does not say.
    """

    text: str = ""
    thinking: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float = 0.0
    elapsed_s: float = 0.0
    worker: str = ""


class ChatApi:
    """The chat endpoint of a server, which may have several gateways.

    Args:
        urls: base URLs without `/v1`; the first one is used until it fails.
        options: fields of the request body besides messages.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        api_key: str,
        options: dict[str, Any],
    ) -> None:
        self._session = session
        self._urls = deque(urls)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._options = options

    async def first_model(self) -> str:
        """Returns the name of the first served model.

        Raises:
            ChatError: no server answers, or it does not speak the OpenAI API.
        """
        for number in range(len(self._urls)):
            url = self._urls[0]
            try:
                async with self._session.get(f"{url}/v1/models", headers=self._headers) as response:
                    await _check(response)
                    body = json.loads(await response.read())
                return str(body["data"][0]["id"])
            except (aiohttp.ClientError, OSError) as error:
                self._urls.rotate(-1)
                if number == len(self._urls) - 1:
                    raise ChatError(no_gateway(url, error)) from error
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ChatError(f"{url} does not speak the OpenAI API") from error
        raise AssertionError("there is a URL")

    async def stream(
        self, model: str, conversation: Conversation, answer: Answer
    ) -> AsyncGenerator[Piece, None]:
        """Yields the next answer piece by piece; closing the generator cancels it.

        A cut stream resumes after its last piece, at the first gateway that answers.

        Args:
            answer: filled while the pieces arrive.

        Raises:
            ChatError: the server refused, or the connection broke.
        """
        body = {
            **self._options,
            "model": model,
            "messages": conversation.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = moved = time.monotonic()
        last_id, num_cuts = "", 0
        while True:
            try:
                async with aclosing(self._events(body, last_id, answer)) as events:
                    async for event_id, event in events:
                        last_id, moved, num_cuts = event_id, time.monotonic(), 0
                        piece = _take(event, answer)
                        answer.elapsed_s = moved - started
                        if any(piece):
                            answer.ttft_s = answer.ttft_s or answer.elapsed_s
                            yield piece
                return
            except _CutError as error:
                url, num_cuts = self._urls[0], num_cuts + 1
                self._urls.rotate(-1)
                has_begun = answer.elapsed_s > 0
                can_go_on = last_id if has_begun else num_cuts < len(self._urls)
                if not can_go_on or time.monotonic() > moved + GO_ON_S:
                    raise ChatError(f"{url}: {error}") from error
                await asyncio.sleep(_PAUSES_S[min(num_cuts, len(_PAUSES_S)) - 1])

    async def _events(
        self, body: dict[str, Any], last_id: str, answer: Answer
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields the events of one connection, each with the id from which to resume after it.

        Raises:
            ChatError: the server refused.
            _CutError: the stream broke off and may be resumed.
        """
        # Even an empty one says that ids are wanted.
        headers = {**self._headers, "Last-Event-ID": last_id}
        url = f"{self._urls[0]}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                if last_id and response.status >= 500:
                    raise _CutError(f"{response.status}: {response.reason}")
                await _check(response)
                answer.worker = response.headers.get("x-kvmesh-decode-worker", "")
                async for given_id, event in _events(response.content):
                    last_id = last_id if given_id is None else given_id
                    if "error" in event and event["error"].get("code") in _LOST_CODES:
                        raise _CutError(str(event["error"]["message"]))
                    yield last_id, event
        except (aiohttp.ClientError, OSError) as error:
            raise _CutError(str(error) or type(error).__name__) from error
        except ValueError as error:
            raise ChatError(f"{url}: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.text()
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.strip()[:200]
    hint = "; give it one of its keys in KVMESH_API_KEY" if response.status == _NO_KEY else ""
    if response.status == _GONE:
        message = f"the answer was cut and cannot go on: {message}"
    raise ChatError(f"{response.status}: {message}{hint}")


async def _events(
    lines: AsyncIterable[bytes],
) -> AsyncIterator[tuple[str | None, dict[str, Any]]]:
    """Yields the events of a stream until its end, each with its id."""
    given_id: str | None = None
    async for line in lines:
        if not line.endswith(_END):
            break  # an incomplete line does not count
        if line.startswith(_ID):
            given_id = line.removeprefix(_ID).strip().decode()
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA).strip()
        if data == b"[DONE]":
            return
        yield given_id, json.loads(data)
        given_id = None
    raise _CutError("the stream ended before its last event")


def _take(event: dict[str, Any], answer: Answer) -> Piece:
    """Adds an event to the answer and returns its text."""
    if "error" in event:
        raise ChatError(str(event["error"]["message"]))
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    thinking, text = "", ""
    for choice in event.get("choices", ()):
        delta = choice["delta"]
        text += delta.get("content") or ""
        thinking += delta.get("reasoning_content") or delta.get("reasoning") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text += text
    answer.thinking += thinking
    return Piece(thinking, text)
