"""Chunks made from a template are those made the long way; what is not plain is refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.console.request_log import RequestLog
from kvmesh.core.types import Placement, RequestId, SamplingParams, WorkerId
from kvmesh.policy.quota import Tenant
from services.gateway.admission import Ticket
from services.gateway.answers import dumps
from services.gateway.detokenizer import Detokenizer
from services.gateway.mesh import GenerationRequest, Placed
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import ApiCall, Endpoint, TextPrompt
from services.gateway.request_record import RequestRecord, TextDelta
from services.gateway.responses import ChoiceText, Responses
from services.gateway.token_lane import MAX_UNSENT_BYTES, ChunkTemplate, TokenLane
from tests.unit.gateway.fake_transport import FakeTransport
from tests.unit.gateway.tiny_model import make_tokenizer

SENTENCE = 'naïve "quotes"\n\t and 🙂'


def _responses(endpoint: Endpoint, request_id: str, *, usage: bool = False) -> Responses:
    call = ApiCall(
        endpoint, "m", (TextPrompt("x"),), SamplingParams(), stream=True, include_usage=usage
    )
    return Responses(call, request_id, "model", 1, lambda _: b"")


def _template(responses: Responses) -> ChunkTemplate:
    return ChunkTemplate(lambda text: responses.piece(0, text, (), (), None))


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("usage", [False, True])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), name=st.text("\\u0te x"))
def test_a_chunk_is_the_event_of_the_long_way(
    endpoint: Endpoint, usage: bool, text: str, name: str
) -> None:
    responses = _responses(endpoint, name, usage=usage)
    chunk = _template(responses).chunk(text)
    event = b"data: " + dumps(responses.piece(0, text, (7,), (), None)).encode() + b"\n\n"
    size, _, rest = chunk.partition(b"\r\n")
    assert int(size, 16) == len(event)
    assert rest == event + b"\r\n"


class Client(FakeTransport):
    """A client that reads a chat."""

    @property
    def text(self) -> str:
        bodies = [json.loads(chunk.split(b"data: ")[1]) for chunk in self.sent]
        return "".join(body["choices"][0]["delta"]["content"] for body in bodies)


@dataclass
class Lane:
    lane: TokenLane
    client: Client
    choice: ChoiceText
    metrics: GatewayMetrics
    token_ids: list[int]
    ticket: Ticket


@pytest.fixture
async def opened() -> Lane:
    """A lane whose first piece was sent the long way."""
    tokenizer = make_tokenizer()
    metrics = GatewayMetrics("m")
    lane = TokenLane()
    lane.detokenizer = Detokenizer(tokenizer)
    request = GenerationRequest(RequestId("r"), "m", (1,), SamplingParams(), 1.0)
    ticket = Ticket(Tenant(), lambda *_: None)
    lane.record = RequestRecord(metrics, request, RequestLog(), ticket, 0.0)
    placed = Placed(Placement.AGGREGATED, WorkerId("w"), WorkerId("w"))
    lane.record.add(TextDelta(0, "", (), (), None, 0, placed))
    client, choice = Client(), ChoiceText((1,))
    lane.open(client, _template(_responses(Endpoint.CHAT, "r")), choice)
    return Lane(lane, client, choice, metrics, tokenizer.encode(SENTENCE).ids, ticket)


async def test_text_arrives_whole(opened: Lane) -> None:
    now = asyncio.get_running_loop().time()
    for token_id in opened.token_ids:
        assert opened.lane.push([token_id], now)
    assert opened.client.text == SENTENCE
    assert opened.choice.token_ids == opened.token_ids
    assert opened.ticket.num_tokens == len(opened.token_ids)
    assert opened.lane.record is not None
    opened.lane.record.close("")
    num_tokens = opened.metrics.value("vllm:generation_tokens_total", model_name="m")
    assert num_tokens == len(opened.token_ids)
    # Parts of a character are no text yet, so there are fewer chunks than tokens.
    assert 1 < len(opened.client.sent) < len(opened.token_ids)


async def test_several_tokens_are_one_chunk(opened: Lane) -> None:
    assert opened.lane.push(opened.token_ids, asyncio.get_running_loop().time())
    assert (len(opened.client.sent), opened.client.text) == (1, SENTENCE)


@pytest.mark.parametrize("why", ["slow", "closing", "closed"])
async def test_what_cannot_go_now_is_refused_and_can_go_later(opened: Lane, why: str) -> None:
    now = asyncio.get_running_loop().time()
    if why == "slow":
        opened.client.unsent = MAX_UNSENT_BYTES + 1
    elif why == "closing":
        opened.client.closing = True
    else:
        opened.lane.close()
    assert not opened.lane.push(opened.token_ids, now)
    assert (opened.client.sent, opened.choice.token_ids) == ([], [])
    opened.client.unsent, opened.client.closing = 0, False
    assert opened.lane.push(opened.token_ids, now) is (why != "closed")


async def test_a_lane_begins_once_with_all_that_comes_before_its_text(opened: Lane) -> None:
    lane, now = opened.lane, asyncio.get_running_loop().time()
    lane.close()
    first, *others = opened.token_ids
    assert not lane.first([first], now)  # nothing is prepared
    sent: list[bytes] = []
    template = _template(_responses(Endpoint.CHAT, "r"))
    lane.prepare(opened.client, template, opened.choice, sent.append, b"role,")
    opened.client.closing = True
    assert not lane.first([first], now)
    assert (sent, opened.choice.token_ids, opened.ticket.num_tokens) == ([], [], 0)
    opened.client.closing = False
    assert lane.first([first], now)
    assert not lane.first([first], now)
    assert lane.push(others, now)
    (begun,) = sent
    assert begun.startswith(b"role,data: ")
    opened.client.sent.insert(0, begun)
    assert opened.client.text == SENTENCE
    assert opened.choice.token_ids == opened.token_ids
    assert opened.ticket.num_tokens == len(opened.token_ids)
