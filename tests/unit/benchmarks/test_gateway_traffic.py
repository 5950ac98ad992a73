"""What the gateway bench sends."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import tokenizers

from benchmarks.gateway_traffic import (
    NUM_CHATS,
    Request,
    fresh_chats,
    grown_chats,
    mean_tokens,
    payloads,
)
from benchmarks.our_mesh import CHECKPOINT
from kvmesh.core.types import Endpoint

ENDPOINT = Endpoint("127.0.0.1", 80)
SHORT = Request(16, stream=False)


def _bodies(*requests: Request, count: int) -> list[dict[str, object]]:
    sent = islice(payloads(ENDPOINT, fresh_chats(1), *requests), count)
    return [json.loads(each.split(b"\r\n\r\n", 1)[1]) for each in sent]


def test_no_chat_of_a_round_is_another_ones() -> None:
    bodies = _bodies(SHORT, count=NUM_CHATS)
    assert len({json.dumps(body["messages"]) for body in bodies}) == NUM_CHATS
    others = {json.dumps(messages) for messages in fresh_chats(2)}
    assert not others & {json.dumps(body["messages"]) for body in bodies}


def test_all_systems_get_the_same() -> None:
    assert _bodies(SHORT, count=50) == _bodies(SHORT, count=50)


def test_kinds_of_requests_take_turns() -> None:
    two = Request(16, stream=True, extra={"n": 2})
    bodies = _bodies(SHORT, SHORT, two, count=6)
    assert [body.get("n") for body in bodies] == [None, None, 2] * 2
    assert [body["stream"] for body in bodies] == [False, False, True] * 2


def test_most_of_a_grown_chat_was_sent_before() -> None:
    known: set[str] = set()
    num_known = num_all = 0
    for messages in grown_chats(1):
        for count, message in enumerate(messages, 1):
            size = len(message["content"])
            num_all += size
            num_known += size * (json.dumps(messages[:count]) in known)
        known.update(json.dumps(messages[:count]) for count in range(len(messages) + 1))
    assert 0.7 < num_known / num_all < 0.95


def test_chats_have_many_tokens_in_a_small_vocabulary() -> None:
    """Scripts other than Latin take about a token per byte there."""
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert mean_tokens(tokenizer) == pytest.approx(3700, rel=0.1)
