"""A request that asks the scheduler is sent with its answer, and goes on when that is no good."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from kvmesh.core.types import (
    Endpoint,
    Placement,
    PrefixSource,
    Refusal,
    RefusalReason,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from services.gateway.api.answers import Answer
from services.gateway.request.routing import Router
from tests.integration.gateway_fake_worker import Behaviour
from tests.integration.gateway_fakes import FakeMesh
from tests.integration.gateway_stack import CHAT, TWO_PAIRS, Stack, gateway_stack, noted_asks
from tests.waiting import until

SAYS = "one question, one worker, one message"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Messages that asked workers for blocks."""
    return noted_asks(monkeypatch, lambda reserve: reserve)


@pytest.fixture
async def stack(tmp_path: Path, begun: list[Any]) -> AsyncIterator[Stack]:
    """Plans name one worker."""
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        stack.mesh.placement = Placement.AGGREGATED
        yield stack


async def ask(stack: Stack, **more: Any) -> str:
    """The whole text of a stream."""
    chunks = await stack.client.chat.completions.create(**CHAT, **more, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def test_one_question_and_one_message(stack: Stack, begun: list[Any]) -> None:
    headers = {"x-slo-ttft-ms": "9000"}
    raw = await stack.client.chat.completions.with_raw_response.create(
        **CHAT, extra_headers=headers
    )
    assert raw.parse().choices[0].message.content == SAYS
    assert raw.headers["x-kvmesh-decode-worker"] == raw.headers["x-kvmesh-prefill-worker"] == "p1"
    assert await ask(stack) == SAYS
    assert (len(begun), len(stack.mesh.queries)) == (2, 2)
    query = stack.mesh.queries[0]
    block_size = stack.mesh.workers["p1"].info.layout.block_size
    assert len(query.block_hashes) == query.num_tokens // block_size > 0
    assert 0 < query.ttft_budget_ms <= 9000
    assert 0 < begun[0].start_within_ms <= 9000
    await stack.idle()


async def test_the_worker_hears_where_the_cached_prefix_is(
    stack: Stack, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PrefixSource(WorkerId("p2"), 1, Endpoint("127.0.0.1", 1), 3)
    plan = FakeMesh.plan

    def with_source(self: FakeMesh, query: RouteQuery) -> RoutePlan:
        made = plan(self, query)
        return replace(made, prefill=tuple(replace(each, source=source) for each in made.prefill))

    monkeypatch.setattr(FakeMesh, "plan", with_source)
    assert await ask(stack) == SAYS
    assert begun[0].source.num_blocks == 3
    assert begun[0].source.worker_id == "p2"
    await stack.idle()


@pytest.mark.parametrize(
    "trouble", [{"reject_offers": 1}, {"refuse_reserves": 1}, {"fail_decode_after": 3}]
)
async def test_what_a_worker_does_not_do_another_one_does(
    stack: Stack, begun: list[Any], trouble: dict[str, Any]
) -> None:
    stack.mesh.workers["p1"].does = Behaviour(**trouble)
    assert await ask(stack) == SAYS
    assert len(begun) == 2
    # The other worker of a plan is asked before the scheduler is; who lost it is named to it.
    lost = "fail_decode_after" in trouble
    assert [query.lost for query in stack.mesh.queries] == [frozenset(), {"p1"}][: 1 + lost]
    await stack.idle()


async def test_a_plan_for_two_workers_is_asked_for_once(stack: Stack, begun: list[Any]) -> None:
    stack.mesh.placement = Placement.DISAGGREGATED
    assert await ask(stack) == SAYS
    assert (len(begun), len(stack.mesh.queries)) == (1, 1)
    assert not begun[0].start_within_ms
    await stack.idle()


async def test_a_refusal_is_waited_out_before_the_next_question(
    stack: Stack, begun: list[Any]
) -> None:
    stack.mesh.refuse_routes = Refusal(RefusalReason.NO_WORKERS, "none is awake")
    asking = asyncio.ensure_future(ask(stack))
    await stack.mesh.until(lambda: len(stack.mesh.queries) > 1)
    # The second one says that somebody waits.
    assert [query.waiting for query in stack.mesh.queries[:2]] == [0, 1]
    stack.mesh.refuse_routes = None
    assert begun == []
    assert await asking == SAYS
    await stack.idle()


async def test_what_can_never_run_is_said_at_once(stack: Stack) -> None:
    stack.mesh.refuse_routes = Refusal(RefusalReason.TOO_LONG, "too long for all")
    with pytest.raises(openai.BadRequestError, match="too long for all"):
        await ask(stack)
    assert len(stack.mesh.queries) == 1
    await stack.idle()


async def test_who_leaves_while_the_scheduler_thinks_leaves_nothing(
    stack: Stack, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def silent(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Router, "route", silent)
    asking = asyncio.ensure_future(ask(stack))
    await asked.wait()
    assert stack.gateway.lanes.num_waiting == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await stack.idle()
    assert begun == []


async def test_without_a_scheduler_the_last_view_serves(stack: Stack) -> None:
    await stack.mesh.stop_scheduler()
    assert await ask(stack) == SAYS
    await stack.idle()


@pytest.mark.parametrize("placement", [Placement.AGGREGATED, Placement.DISAGGREGATED])
@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_answer_held_is_free_when_it_ends(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, placement: Placement, stream: bool
) -> None:
    """Without a collection of garbage: prompts and texts of seconds would lie around until it."""
    stack.mesh.placement = placement

    answers: list[weakref.ref[Answer]] = []
    make = Answer.__init__

    def noted(self: Answer, *args: Any) -> None:
        answers.append(weakref.ref(self))
        make(self, *args)

    monkeypatch.setattr(Answer, "__init__", noted)

    def all_free() -> bool:
        return bool(answers) and all(each() is None for each in answers)

    gc.disable()
    try:
        if stream:
            assert await ask(stack) == SAYS
        else:
            await stack.client.chat.completions.create(**CHAT)
        await stack.mesh.until(all_free)
        stack.mesh.refuse_routes = Refusal(RefusalReason.TOO_LONG, "too long for all")
        with pytest.raises(openai.BadRequestError):
            await stack.client.chat.completions.create(**CHAT, stream=stream)
        await stack.mesh.until(all_free)
    finally:
        gc.enable()


def named_with_lower_tokens(
    monkeypatch: pytest.MonkeyPatch, source: PrefixSource | None = None
) -> None:
    """Plans say that the first worker holds a block on disk."""
    plan = FakeMesh.plan

    def with_lower(self: FakeMesh, query: RouteQuery) -> RoutePlan:
        made = plan(self, query)
        size = self.workers["p1"].info.layout.block_size
        first = replace(made.prefill[0], cached_tokens=size, disk_tokens=size, source=source)
        return replace(made, prefill=(first, *made.prefill[1:]))

    monkeypatch.setattr(FakeMesh, "plan", with_lower)


async def test_who_holds_a_prefix_below_its_pool_hears_of_it_before_the_offer(
    stack: Stack, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await ask(stack) == SAYS  # connects
    named_with_lower_tokens(monkeypatch)
    stack.mesh.placement = Placement.DISAGGREGATED
    assert await ask(stack) == SAYS
    worker = stack.mesh.workers["p1"]
    ((request_id, hashes),) = worker.prefetched
    assert hashes == stack.mesh.queries[-1].block_hashes[0]
    assert request_id == worker.offers[-1][0]
    assert (request_id, 0) not in worker.cancels, "it was taken"
    await stack.idle()


async def test_a_prefetch_ends_with_the_request_and_when_another_worker_takes_it(
    stack: Stack, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await ask(stack) == SAYS
    named_with_lower_tokens(monkeypatch)
    stack.mesh.placement = Placement.DISAGGREGATED
    worker = stack.mesh.workers["p1"]
    worker.does = Behaviour(reject_offers=1)
    assert await ask(stack) == SAYS
    ((request_id, _),) = worker.prefetched
    await until(lambda: (request_id, 0) in worker.cancels, "the prefetch was ended")
    # The client goes while nobody takes its prompt.
    for each in stack.mesh.workers.values():
        each.does = Behaviour(reject_offers=10_000)
    waiting = asyncio.create_task(ask(stack))
    await until(lambda: len(worker.prefetched) == 2, "it was routed")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    request_id, _ = worker.prefetched[1]
    await until(lambda: (request_id, 0) in worker.cancels, "the prefetch was ended")
    await stack.idle()


async def test_what_is_fetched_from_another_worker_is_not_brought_up(
    stack: Stack, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await ask(stack) == SAYS
    nowhere = Endpoint("127.0.0.1", 1)
    source = PrefixSource(WorkerId("p2"), 1, nowhere, 3, before_load=True)
    named_with_lower_tokens(monkeypatch, source)
    assert await ask(stack) == SAYS
    assert begun[-1].source.before_load
    assert not stack.mesh.workers["p1"].prefetched
    await stack.idle()
