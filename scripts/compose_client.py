"""A client of the containers' gateway and what it demands of a streamed answer.

Tests: tests/unit/packaging/test_compose_client.py.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

NUM_TOKENS = 600
PROMPT = "The module provides a function that"

_MIDDLE_TOKENS = 20
_READ_TIMEOUT_S = 60.0


class CheckError(Exception):
    """The stack runs and does not do what it should."""


def check(holds: bool, message: str) -> None:
    """Ends the run with a message unless the condition holds."""
    if not holds:
        raise CheckError(message)


@dataclass(slots=True)
class Answer:
    """What a streamed completion brought.

    Attributes:
        pieces: number of tokens in each event that had any.
        worker: decode worker that the stream began on.
    """

    worker: str
    text: str = ""
    pieces: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Who ran a request's prompt, and why, as the answer's headers say."""

    prefill: str
    decision: str


def parse_event(answer: Answer, line: bytes) -> None:
    """Adds one line of a server-sent event stream to the answer.

    Raises:
        CheckError: the event is an error.
    """
    if not line.startswith(b"data: "):
        return
    data = line.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    check("error" not in event, f"the stream brought an error: {data.decode()}")
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if choice.get("token_ids"):
            answer.pieces.append(len(choice["token_ids"]))


class Client:
    """Talks to a gateway."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0 if nobody listens."""
        with closing(http.client.HTTPConnection(*self._address, timeout=5)) as connection:
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read().decode()
            except (OSError, http.client.HTTPException):
                return 0, ""

    def stream(self, model: str, during: Callable[[Answer], None] = lambda answer: None) -> Answer:
        """Streams one greedy completion; `during` is called once, in the middle."""
        body = {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection(*self._address, timeout=_READ_TIMEOUT_S)
        with closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            check(response.status == 200, f"the gateway answered {response.status}")
            answer = Answer(response.getheader("x-kvmesh-decode-worker", ""))
            called = False
            while line := response.readline():
                parse_event(answer, line)
                if not called and sum(answer.pieces) >= _MIDDLE_TOKENS:
                    called = True
                    during(answer)
            return answer

    def placed(self, prompt: str) -> Placed:
        """Where a completion of four tokens after the prompt was computed."""
        body = json.dumps({"model": self.model(), "prompt": prompt, "max_tokens": 4})
        headers = {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection(*self._address, timeout=_READ_TIMEOUT_S)
        with closing(connection):
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            check(response.status == 200, f"the gateway answered {response.status}")
            response.read()
            names = ("x-kvmesh-prefill-worker", "x-kvmesh-decision")
            return Placed(*(response.getheader(name, "") for name in names))

    def model(self) -> str:
        """Name of the served model."""
        status, body = self.get("/v1/models")
        check(status == 200, f"/v1/models answered {status}")
        return str(json.loads(body)["data"][0]["id"])

    def num_moves(self) -> float:
        """How often the gateway moved lost work."""
        _, body = self.get("/metrics")
        rows = [row for row in body.splitlines() if row.startswith("kvmesh_gateway_moves_total")]
        return sum(float(row.rpartition(" ")[2]) for row in rows)


def check_answer(answer: Answer) -> None:
    """An answer that is complete and came token by token."""
    tokens = sum(answer.pieces)
    check(answer.done, "the stream ended without [DONE]")
    check(answer.finish_reason == "length", f"finish reason {answer.finish_reason!r}")
    check(tokens == NUM_TOKENS, f"{tokens} tokens came, {NUM_TOKENS} were asked for")
    counted = answer.usage.get("completion_tokens")
    check(counted == NUM_TOKENS, f"usage says {counted} tokens")
    check(
        len(answer.pieces) > NUM_TOKENS // 2,
        f"tokens did not come one by one: {len(answer.pieces)} events for {tokens} tokens",
    )
