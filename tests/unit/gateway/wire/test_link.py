"""Plain tokens of one event-loop iteration are delivered together, and in order with all else."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvmesh.core.types import RequestId, WorkerId
from kvmesh.policy.answer_times import AnswerTimes
from kvmesh.v1 import types_pb2
from kvmesh.v1.decode_service_pb2 import DecodeEvent, DecodeResponse
from services.gateway.wire.worker_events import Failed, HandedOff, Tokens, WorkerEvent, decode_event
from services.gateway.wire.worker_sessions import AttemptKey, Link

KEY: AttemptKey = (RequestId("a"), 1)
OTHER: AttemptKey = (RequestId("b"), 2)


class Taker:
    """Notes what it is given; `ends_at` so many calls its attempt is over."""

    def __init__(self, link: Link, key: AttemptKey, ends_at: int = 1 << 30) -> None:
        self.calls: list[tuple[int, list[int]] | WorkerEvent] = []
        self._link, self._key, self._ends_at = link, key, ends_at
        link._takers[key] = self

    def takes(self, attempt: int, tokens: Tokens) -> None:
        assert attempt == self._key[1]
        self._note((tokens.first_position, [*tokens.token_ids]))

    def put(self, attempt: int, event: WorkerEvent) -> None:
        assert attempt == self._key[1]
        self._note(event)

    def _note(self, call: tuple[int, list[int]] | WorkerEvent) -> None:
        self.calls.append(call)
        if len(self.calls) == self._ends_at:
            self._link.forget(self._key)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """Positions and ids of all tokens, in the order in which they came."""
        found: list[tuple[int, int]] = []
        for call in self.calls:
            if isinstance(call, Tokens):
                found += enumerate(call.token_ids, call.first_position)
            elif not isinstance(call, Failed | HandedOff):
                assert isinstance(call, tuple)
                first, token_ids = call
                assert isinstance(first, int)
                assert isinstance(token_ids, list)
                found += enumerate(token_ids, first)
        return found


def tokens(
    key: AttemptKey, first: int, *token_ids: int, ends: bool = False, scored: bool = False
) -> DecodeEvent:
    event = DecodeEvent(request_id=key[0], attempt=key[1])
    event.tokens.first_position = first
    event.tokens.token_ids.extend(token_ids)
    if ends:
        event.tokens.finish_reason = types_pb2.FINISH_REASON_LENGTH
    if scored:
        event.tokens.logprobs.extend(types_pb2.TokenLogprobs(logprob=-1.0) for _ in token_ids)
    return event


@pytest.fixture
async def link() -> Link:
    return Link(
        "worker",
        _never_called,
        lambda message: decode_event(message, WorkerId("d1")),
        is_prefill=False,
        times=AnswerTimes(),
    )


def _never_called(_: Any) -> Any:
    raise AssertionError("nothing is sent")


def receives(link: Link, *events: DecodeEvent) -> None:
    link._receive(DecodeResponse(events=events))


async def test_tokens_of_one_iteration_are_joined(link: Link) -> None:
    one, other = Taker(link, KEY), Taker(link, OTHER)
    receives(link, tokens(KEY, 5, 50), tokens(OTHER, 9, 90))
    receives(link, tokens(KEY, 6, 60, 61), tokens(OTHER, 10, 100))
    assert not one.calls
    await asyncio.sleep(0)
    assert one.calls == [(5, [50, 60, 61])]
    assert other.calls == [(9, [90, 100])]
    receives(link, tokens(KEY, 8, 80))
    await asyncio.sleep(0)
    assert one.calls[1:] == [(8, [80])]


async def test_the_last_tokens_come_after_those_that_wait(link: Link) -> None:
    taker = Taker(link, KEY)
    receives(link, tokens(KEY, 5, 50), tokens(KEY, 6, 60, ends=True))
    assert taker.tokens == [(5, 50), (6, 60)]
    await asyncio.sleep(0)
    assert len(taker.calls) == 2


async def test_tokens_with_scores_do_not_wait(link: Link) -> None:
    taker = Taker(link, KEY)
    receives(link, tokens(KEY, 5, 50), tokens(KEY, 6, 60, scored=True), tokens(KEY, 7, 70))
    assert taker.tokens == [(5, 50), (6, 60)]
    await asyncio.sleep(0)
    assert taker.tokens == [(5, 50), (6, 60), (7, 70)]


async def test_a_gap_is_not_joined_over(link: Link) -> None:
    taker = Taker(link, KEY)
    receives(link, tokens(KEY, 5, 50), tokens(KEY, 7, 70), tokens(KEY, 7, 70))
    await asyncio.sleep(0)
    assert taker.calls == [(5, [50]), (7, [70]), (7, [70])]


async def test_an_attempt_that_is_over_gets_nothing(link: Link) -> None:
    taker = Taker(link, KEY)
    receives(link, tokens(KEY, 5, 50))
    link.forget(KEY)
    await asyncio.sleep(0)
    receives(link, tokens(KEY, 6, 60))
    await asyncio.sleep(0)
    assert not taker.calls
    ends_early = Taker(link, OTHER, ends_at=1)
    receives(link, tokens(OTHER, 5, 50), tokens(OTHER, 6, 60, ends=True))
    assert ends_early.calls == [(5, [50])]
    assert not link.num_open


async def test_a_broken_stream_delivers_what_came_before(link: Link) -> None:
    taker = Taker(link, KEY)
    receives(link, tokens(KEY, 5, 50))
    link._fail_all("closed by peer")
    await asyncio.sleep(0)
    assert taker.calls[0] == (5, [50])
    assert isinstance(taker.calls[1], Failed)
    assert len(taker.calls) == 2


@pytest.mark.parametrize("seed", range(20))
async def test_each_attempt_gets_its_tokens_in_order(link: Link, seed: int) -> None:
    """Joined events deliver the same tokens as separate ones."""
    rng = random.Random(seed)
    keys: list[AttemptKey] = [(RequestId(f"r{number}"), number) for number in range(4)]
    takers = {key: Taker(link, key) for key in keys}
    sent: dict[AttemptKey, list[tuple[int, int]]] = {key: [] for key in keys}
    position = dict.fromkeys(keys, 0)
    for _ in range(200):
        key = rng.choice(keys)
        if rng.random() < 0.1:  # a gap, or a repetition
            position[key] = max(0, position[key] + rng.choice((-2, 3)))
        token_ids = [rng.randrange(1000) for _ in range(rng.choice((1, 1, 1, 3)))]
        receives(link, tokens(key, position[key], *token_ids, scored=rng.random() < 0.1))
        sent[key] += enumerate(token_ids, position[key])
        position[key] += len(token_ids)
        if rng.random() < 0.2:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert {key: taker.tokens for key, taker in takers.items()} == sent
    assert any(len(call[1]) > 1 for t in takers.values() for call in t.calls if type(call) is tuple)
