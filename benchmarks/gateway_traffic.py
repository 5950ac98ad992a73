"""What `benchmarks.gateway` sends: chats of 800 to 8,000 characters, none twice in a round.

All systems get the same ones in a round of a phase.
Tests: tests/unit/benchmarks/test_gateway_traffic.py.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from benchmarks.chat_prompts import Messages, chats, growing
from benchmarks.gateway_load import request_bytes
from benchmarks.our_mesh import MODEL
from kvmesh.core.types import Endpoint

NUM_CHATS = 3000
"""A system that answers more of them in a round begins anew."""

USERS, TURNS = 60, 12

KEPT = 4
"""Rounds whose chats are kept for the next phase."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place today, in words, degrees and wind.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Town and country."},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["place"],
        },
    },
}
PERSON = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "languages": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "age", "languages"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Request:
    """The fields of a chat request other than its messages.

    Attributes:
        headers: further header lines, each with its end.
        extra: further fields of the body.
    """

    num_tokens: int
    stream: bool
    headers: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self, endpoint: Endpoint, messages: Messages) -> bytes:
        """As it goes over the wire."""
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": self.num_tokens,
            "stream": self.stream,
            "ignore_eos": True,
            **self.extra,
        }
        return request_bytes(endpoint, body, self.headers)


def payloads(
    endpoint: Endpoint, messages: Sequence[Messages], *requests: Request
) -> Iterator[bytes]:
    """Each chat once, then again; several kinds of request take turns."""
    kinds = itertools.cycle(requests)
    for each in itertools.cycle(messages):
        yield next(kinds).to_bytes(endpoint, each)


def prepare(seed: int) -> None:
    """Makes the chats of a round before any system has its turn: the first would wait for it, and
    run beside the garbage collections that follow.
    """
    fresh_chats(seed)
    grown_chats(seed)
    gc.collect()
    gc.freeze()


@lru_cache(KEPT)
def fresh_chats(seed: int) -> Sequence[Messages]:
    """Chats that have nothing in common but their first lines."""
    return [messages for _, messages in chats(NUM_CHATS, seed)]


def mean_tokens(tokenizer: Tokenizer) -> float:
    """Tokens of such a chat on average, without those of the template."""
    some = fresh_chats(1)[::10]
    contents = [message["content"] for chat in some for message in chat]
    return sum(len(each.ids) for each in tokenizer.encode_batch(contents)) / len(some)


@lru_cache(KEPT)
def grown_chats(seed: int) -> Sequence[Messages]:
    """Chats of some users who go on, turn by turn: most of each was sent before."""
    return list(growing(USERS, TURNS, seed))
