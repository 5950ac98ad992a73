"""One conversation over the OpenAI HTTP API: what was said, and the next answer as it comes.

Tests: tests/unit/cli/test_chat_api.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from kvmesh.cli.stack_state import no_gateway
from kvmesh.core.errors import KvMeshError

_DATA = b"data: "
_NO_KEY = 401


class ChatError(KvMeshError):
    """The server did not answer, or said no."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, for the next request.

    Attributes:
        system: said before everything else; empty says nothing.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """All messages in order."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def ask(self, text: str) -> None:
        """The user says something."""
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        """The model has answered, or was stopped in the middle of it."""
        self.turns.append({"role": "assistant", "content": text})

    def undo(self) -> bool:
        """Takes the last question and its answer back; False if there is none."""
        while self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        return bool(self.turns) and bool(self.turns.pop())

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.turns.clear()


class Piece(NamedTuple):
    """More of an answer."""

    thinking: str
    text: str


@dataclass(slots=True)
class Answer:
    """An answer and what it cost; grows while it comes.

    Attributes:
        thinking: what the model thought before it answered.
        ttft_s: sending to the first piece of thinking or text.
        worker: who generated it, where the server says so.
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
    """The chat endpoint of a server.

    Args:
        url: base URL, without `/v1`.
        options: fields of the body besides messages.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, api_key: str, options: dict[str, Any]
    ) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._options = options

    async def first_model(self) -> str:
        """Name of the first model that is served.

        Raises:
            ChatError: there is no answer, or not one of such a server.
        """
        try:
            url = f"{self._url}/v1/models"
            async with self._session.get(url, headers=self._headers) as response:
                await _check(response)
                body = json.loads(await response.read())
            return str(body["data"][0]["id"])
        except (aiohttp.ClientError, OSError) as error:
            raise ChatError(no_gateway(self._url, error)) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ChatError(f"{self._url} does not speak the OpenAI API") from error

    async def stream(
        self, model: str, conversation: Conversation, answer: Answer
    ) -> AsyncGenerator[Piece, None]:
        """The next answer, piece by piece; close the generator to cancel it.

        Args:
            answer: filled while the pieces come.

        Raises:
            ChatError: the server said no, or the connection broke.
        """
        body = {
            **self._options,
            "model": model,
            "messages": conversation.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.monotonic()
        url = f"{self._url}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=self._headers) as response:
                await _check(response)
                answer.worker = response.headers.get("x-kvmesh-decode-worker", "")
                async for event in _events(response.content):
                    piece = _take(event, answer)
                    answer.elapsed_s = time.monotonic() - started
                    if any(piece):
                        answer.ttft_s = answer.ttft_s or answer.elapsed_s
                        yield piece
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ChatError(f"{self._url}: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.text()
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.strip()[:200]
    hint = "; give it one of its keys in KVMESH_API_KEY" if response.status == _NO_KEY else ""
    raise ChatError(f"{response.status}: {message}{hint}")


async def _events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream until its end."""
    async for line in lines:
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA).strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise ChatError("the stream ended before its last event")


def _take(event: dict[str, Any], answer: Answer) -> Piece:
    """Adds an event to the answer and returns what it says."""
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
