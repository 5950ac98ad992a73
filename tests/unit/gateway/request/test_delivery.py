"""Tokens are pushed as text, each once and whole, whatever writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import FinishReason, Placement, RequestId, SamplingParams, TokenLogprobs
from services.gateway.api.answers import EventTemplate, dumps
from services.gateway.api.openai import ApiCall, Endpoint, TextPrompt
from services.gateway.api.responses import Responses
from services.gateway.request.choice import Choice
from services.gateway.request.delivery import Delivery, pulled, together
from services.gateway.request.mesh import GenerationRequest, Placed
from tests.unit.gateway.tiny_model import make_tokenizer

SENTENCE = 'naïve "quotes"\n\t and 🙂'
WORD = TokenLogprobs(-0.5, (), ())


def _responses(endpoint: Endpoint, request_id: str, *, usage: bool = False) -> Responses:
    call = ApiCall(
        endpoint, "m", (TextPrompt("x"),), SamplingParams(), stream=True, include_usage=usage
    )
    return Responses(call, request_id, "model", 1, lambda _: b"")


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("usage", [False, True])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), name=st.text("\\u0te x"))
def test_an_event_of_a_template_is_the_event(
    endpoint: Endpoint, usage: bool, text: str, name: str
) -> None:
    responses = _responses(endpoint, name, usage=usage)
    template = EventTemplate(lambda text: responses.piece(0, text, (), (), None))
    event = b"data: " + dumps(responses.piece(0, text, (7,), (), None)).encode() + b"\n\n"
    assert template.event(text) == event


@dataclass
class Kept:
    """A sink that keeps what it is given."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    where: Placed | None = None
    num_cached: int = -1
    stop: str = ""

    def placed(self, where: Placed) -> None:
        self.where = where

    def first(self, cached_tokens: int, _: Sequence[TokenLogprobs], __: bytes) -> None:
        self.num_cached = cached_tokens

    def stopped(self, stop: str) -> None:
        self.stop = stop

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        assert self.finish is None, "a piece after the last one"
        self.text += text
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.finish = finish


@dataclass
class Counted:
    """A ledger that counts."""

    num_tokens: int = 0
    finish: FinishReason | None = None

    def tokens(self, count: int, now: float) -> None:
        self.num_tokens += count

    def ends(self, finish: FinishReason) -> None:
        self.finish = finish


@dataclass
class Tokenizer:
    fast: Any
    whole: None = None


def _delivery(**fields: Any) -> tuple[Delivery, Kept, Counted, list[int]]:
    fast = make_tokenizer()
    call = ApiCall(Endpoint.CHAT, "m", (TextPrompt("x"),), SamplingParams(), **fields)
    request = GenerationRequest(RequestId("r"), "m", (1,), b"", SamplingParams(), 0.0, 1.0)
    sink, ledger, tokenizer = Kept(), Counted(), Tokenizer(fast)
    choice = Choice(0, 0, request, call)
    delivery = Delivery(tokenizer, choice, ledger, sink)  # type: ignore[arg-type]
    return delivery, sink, ledger, list(fast.encode(SENTENCE).ids)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("stop", [(), ("\0",)])
def test_text_is_whole_however_the_tokens_come(size: int, stop: tuple[str, ...]) -> None:
    delivery, sink, ledger, token_ids = _delivery(stop=stop)
    delivery.first(2, (), b"")
    delivery.placed(Placed(Placement.AGGREGATED, *"pd"))
    for first in range(0, len(token_ids), size):
        part = tuple(token_ids[first : first + size])
        assert delivery.tokens(part, (WORD,) * len(part), None, 0.0)
    assert not delivery.tokens((), (), FinishReason.LENGTH, 0.0)
    assert (sink.text, sink.token_ids) == (SENTENCE, token_ids)
    assert sink.logprobs == [WORD] * len(token_ids)
    assert sink.finish is ledger.finish is FinishReason.LENGTH
    assert ledger.num_tokens == len(token_ids)
    assert (sink.num_cached, sink.where is not None) == (2, True)


def test_nothing_comes_after_a_stop_string() -> None:
    delivery, sink, ledger, token_ids = _delivery(stop=("quotes",))
    count = 0
    while delivery.tokens((token_ids[count],), (WORD,), None, 0.0):
        count += 1
    count += 1
    assert sink.text == 'naïve "'
    assert sink.finish is ledger.finish is FinishReason.STOP
    assert sink.stop == "quotes"
    assert len(sink.token_ids) == len(sink.logprobs) == ledger.num_tokens == count


def test_a_stop_token_is_counted_and_not_said() -> None:
    delivery, sink, ledger, token_ids = _delivery()
    assert not delivery.tokens(tuple(token_ids[:2]), (), FinishReason.STOP, 0.0)
    assert SENTENCE.startswith(sink.text)
    assert len(sink.text) == 1
    assert ledger.num_tokens == 2


def test_who_wants_the_prompt_only_gets_nothing_else() -> None:
    delivery, sink, ledger, token_ids = _delivery(max_tokens=0)
    assert not delivery.tokens(tuple(token_ids[:1]), (WORD,), None, 0.0)
    assert (sink.text, sink.token_ids, sink.logprobs) == ("", [], [])
    assert (sink.finish, ledger.num_tokens) == (FinishReason.LENGTH, 0)


async def test_the_first_error_ends_all() -> None:
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("one")

    with pytest.raises(LookupError, match="one"):
        await together([waits("a"), fails(), waits("b")])
    assert sorted(ended) == ["a", "b"]


async def test_what_is_pulled_comes_in_order_and_then_the_error() -> None:
    pieces: asyncio.Queue[int | None] = asyncio.Queue()

    async def work() -> None:
        for number in range(3):
            pieces.put_nowait(number)
        raise LookupError("the end")

    items = pulled(work(), pieces)
    assert [await anext(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="the end"):
        await anext(items)


async def test_who_pulls_no_more_cancels() -> None:
    pieces: asyncio.Queue[int | None] = asyncio.Queue()
    ended: list[bool] = []

    async def work() -> None:
        try:
            pieces.put_nowait(1)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with aclosing(pulled(work(), pieces)) as items:
        assert await anext(items) == 1
    assert ended == [True]
