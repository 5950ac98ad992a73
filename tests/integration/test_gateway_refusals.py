"""Refusals, waiting, disconnects and drain of the gateway, in front of a fake mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.core.types import (
    Refusal,
    RefusalReason,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
)
from kvmesh.policy.answer_times import LATE_SHARE, MAX_WAIT_S, MIN_ANSWERS, MIN_WAIT_S
from services.gateway.config import AccessConfig, QuotaConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import PAIR, TWO_PAIRS, Stack, gateway_stack

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path) as stack:
        yield stack


async def test_busy_until_deadline_is_one_refusal(stack: Stack) -> None:
    stack.mesh.workers["p1"].does.reject_offers = -1
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_headers={"x-slo-ttft-ms": "1000"}
        )
    response = caught.value.response
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.headers["x-kvmesh-refusal"] == "prefill-busy"
    assert caught.value.code == "busy"
    offers = stack.mesh.workers["p1"].offers
    assert len(offers) > 3  # again and again
    attempts = [attempt for _, attempt in offers]
    assert attempts == sorted(set(attempts))  # each offer has a new number
    assert len(stack.mesh.workers["d1"].reserves) == 1  # the reservation was kept meanwhile
    await stack.idle()


async def test_short_prompts_wait_as_long_as_their_length_allows(tmp_path: Path) -> None:
    limits = {"ttft_deadline_ms": 60_000, "ttft_tiers": "8=900, 64=5000"}
    async with gateway_stack(tmp_path, limits=limits) as stack:
        for num_tokens, said in ((8, {}), (9, {}), (65, {}), (1, {"x-slo-ttft-ms": "30000"})):
            await stack.client.completions.create(
                model=MODEL, prompt=[5] * num_tokens, max_tokens=1, extra_headers=said
            )
        waits = [query.ttft_budget_ms for query in stack.mesh.queries]
        assert waits[0] <= 900 < waits[1] <= 5000 < waits[3] <= 30_000 < waits[2] <= 60_000
        stack.mesh.workers["p1"].does.reject_offers = -1
        with pytest.raises(openai.InternalServerError) as caught:
            await stack.client.completions.create(model=MODEL, prompt=[5], max_tokens=1)
        assert caught.value.code == "busy"
        await stack.idle()


async def test_stream_refused_before_it_starts(stack: Stack) -> None:
    stack.mesh.workers["d1"].does.refuse_reserves = -1
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, extra_headers={"x-slo-ttft-ms": "1000"}
        )
    assert caught.value.response.headers["x-kvmesh-refusal"] == "decode-no_slots"
    assert stack.mesh.workers["p1"].offers == []  # nothing is computed for a full decode side
    refusals = stack.gateway.metrics.value(
        "kvmesh_gateway_refusals_total", reason="no_slots", stage="decode"
    )
    # The deadline may come while the last one is not answered yet.
    assert 0 <= len(stack.mesh.workers["d1"].reserves) - refusals <= 1
    await stack.idle()


async def test_scheduler_refuses_until_deadline(stack: Stack) -> None:
    stack.mesh.refuse_routes = Refusal(RefusalReason.NO_WORKERS, "nobody is there")
    with pytest.raises(openai.InternalServerError, match="nobody is there") as caught:
        await stack.client.completions.create(
            model=MODEL, prompt="a", extra_headers={"x-slo-ttft-ms": "1000"}
        )
    assert caught.value.response.headers["x-kvmesh-refusal"] == "scheduler-no_workers"


async def test_too_long_for_every_worker_is_the_callers_error(stack: Stack) -> None:
    worker = stack.mesh.workers["d1"]
    worker.does.refuse_reserves, worker.does.reserve_reason = -1, RefusalReason.TOO_LONG
    with pytest.raises(openai.BadRequestError) as caught:
        await stack.client.completions.create(model=MODEL, prompt="a")
    assert caught.value.code == "context_length_exceeded"
    assert len(worker.reserves) == 1


async def test_waits_for_capacity_and_then_runs(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS) as stack:
        stack.mesh.workers["p1"].does.reject_offers = 3
        stack.mesh.workers["p2"].does.reject_offers = 2
        stack.mesh.workers["d1"].does.refuse_reserves = 1
        answer = await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "one request, one handoff"
        assert len(stack.mesh.workers["d2"].reserves) == 1
        await stack.idle()


THREE = dict.fromkeys(("p1", "p2", "p3"), Role.PREFILL) | {"d1": Role.DECODE}


def names_one_at_a_time(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the scheduler name the first worker that is not to be avoided, as one that is free
    just now.
    """
    whole = stack.mesh.plan

    def plan(query: RouteQuery) -> RoutePlan:
        made = whole(query)
        return replace(made, prefill=made.prefill[:1], cause=RouteCause.HELP)

    monkeypatch.setattr(stack.mesh, "plan", plan)


async def test_who_is_refused_by_two_goes_on_to_the_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_stack(tmp_path, THREE) as stack:
        names_one_at_a_time(stack, monkeypatch)
        for name in ("p1", "p2"):
            stack.mesh.workers[name].does.reject_offers = -1
        answer = await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "one request, one handoff"
        assert len(stack.mesh.workers["p3"].offers) == 1
        await stack.idle()


async def test_who_is_refused_by_all_asks_all_until_its_deadline_and_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_stack(tmp_path, THREE) as stack:
        names_one_at_a_time(stack, monkeypatch)
        for name in ("p1", "p2", "p3"):
            stack.mesh.workers[name].does.reject_offers = -1
        with pytest.raises(openai.InternalServerError) as caught:
            await stack.client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_headers={"x-slo-ttft-ms": "1000"}
            )
        assert caught.value.response.headers["x-kvmesh-refusal"] == "prefill-busy"
        assert all(len(stack.mesh.workers[name].offers) > 1 for name in ("p1", "p2", "p3"))
        await stack.idle()


async def test_lost_reservation_is_made_again(stack: Stack) -> None:
    stack.mesh.workers["p1"].does.lose_reservations = 1
    answer = await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "one request, one handoff"
    assert len(stack.mesh.workers["d1"].reserves) == 2
    await stack.idle()


async def test_two_prefill_workers_never_write_into_one_reservation(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS) as stack:
        # Who took the prompt and did not say so may be writing.
        stack.mesh.workers["p1"].does.break_offers = 1
        answer = await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "one request, one handoff"
        assert len(stack.mesh.workers["p1"].offers) == len(stack.mesh.workers["p2"].offers) == 1
        first, second = stack.mesh.workers["d1"].reserves
        assert first in stack.mesh.workers["d1"].cancels
        assert second not in stack.mesh.workers["d1"].cancels
        await stack.idle()


async def ready_for_a_stopped_worker(stack: Stack) -> None:
    """Answers enough requests that the wait for a worker's answer is short."""
    for _ in range(MIN_ANSWERS):  # each has more than one answer
        await stack.client.chat.completions.create(model=MODEL, messages=HELLO)


async def test_a_worker_that_stops_costs_one_request_a_short_wait_and_is_tried_last(
    tmp_path: Path,
) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS) as stack:
        await ready_for_a_stopped_worker(stack)
        stopped, loop = stack.mesh.workers["p1"], asyncio.get_running_loop()
        stopped.does.answers_wait = True
        others, asked_at = stack.mesh.workers["p2"].offers, loop.time()
        answer = await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert MIN_WAIT_S <= loop.time() - asked_at < MAX_WAIT_S
        assert answer.choices[0].message.content == "one request, one handoff"
        num_others = len(others)
        stack.mesh.queries.clear()
        for _ in range(5):
            # A busy worker is free sooner than the gateway gives up on one that does not answer.
            stack.mesh.workers["p2"].does.reject_offers = 2
            await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert len(others) == num_others + 5 * 3
        assert all(query.unanswered == query.avoid == {"p1"} for query in stack.mesh.queries)
        # It wakes up: what it was asked meanwhile was cancelled, and it is asked again.
        num_before = len(stopped.offers)
        stopped.awake.set()
        await stack.mesh.until(lambda: len(stopped.offers) == num_before + 1)
        await stack.mesh.until(lambda: stopped.offers[-1] in stopped.cancels)
        assert not stopped.prefilling
        async with asyncio.timeout(20):
            # Its late answer reaches the gateway a moment after the cancellation has reached it.
            while len(stopped.offers) == num_before + 1:
                stack.mesh.queries.clear()
                await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert len(stopped.offers) == num_before + 2
        assert [query.avoid for query in stack.mesh.queries] == [frozenset()]
        await stack.idle()


async def test_requests_beside_one_that_waits_for_a_stopped_worker_go_to_others(
    tmp_path: Path,
) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS) as stack:
        await ready_for_a_stopped_worker(stack)
        stopped = stack.mesh.workers["p1"]
        stopped.does.ignore_offers, num_before = -1, len(stopped.offers)
        first = asyncio.create_task(
            stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        )
        await stack.mesh.until(lambda: len(stopped.offers) == num_before + 1)
        await asyncio.sleep(1.5 * LATE_SHARE * MIN_WAIT_S)
        for _ in range(3):
            await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
        assert not first.done()
        assert len(stopped.offers) == num_before + 1
        assert (await first).choices[0].message.content == "one request, one handoff"
        await stack.idle()


async def test_reservation_is_renewed_while_it_waits(stack: Stack) -> None:
    stack.mesh.workers["d1"].does.lease_ms = 30
    stack.mesh.workers["p1"].does.reject_offers = -1
    asked = asyncio.create_task(stack.client.chat.completions.create(model=MODEL, messages=HELLO))
    await stack.mesh.until(lambda: len(stack.mesh.workers["d1"].renewed) >= 3)
    names = {request_id for request_id, _ in stack.mesh.workers["d1"].reserves}
    assert set(stack.mesh.workers["d1"].renewed) == names
    stack.mesh.workers["p1"].does.reject_offers = 0
    assert (await asked).choices[0].finish_reason == "stop"
    await stack.idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_cancels_at_workers(stack: Stack, stream: bool) -> None:
    stack.says("a b c d e f g h")
    stack.mesh.go.clear()
    body = {"model": MODEL, "prompt": "a", "stream": stream, "max_tokens": 400, "ignore_eos": True}
    async with aiohttp.ClientSession(stack.url) as session:
        asked = asyncio.create_task(session.post("/v1/completions", json=body))
        worker = stack.mesh.workers["d1"]
        await stack.mesh.until(lambda: len(worker.running) == 1)
        asked.cancel()
        (answer,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(answer, aiohttp.ClientResponse):  # the head of the stream was there already
            answer.close()
    await stack.idle()
    assert worker.cancels == worker.reserves
    aborted = stack.gateway.metrics.value(
        "vllm:request_success_total", model_name=MODEL, finished_reason="abort"
    )
    assert aborted == 1


async def test_disconnect_while_waiting_gives_the_reservation_back(stack: Stack) -> None:
    stack.mesh.workers["p1"].does.reject_offers = -1
    async with aiohttp.ClientSession(stack.url) as session:
        asked = asyncio.create_task(
            session.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
        )
        await stack.mesh.until(lambda: len(stack.mesh.workers["p1"].offers) > 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await stack.idle()
    assert stack.mesh.workers["d1"].cancels == stack.mesh.workers["d1"].reserves


async def test_keys_and_quota(tmp_path: Path) -> None:
    access, quota = AccessConfig(api_keys="key,other"), QuotaConfig(max_concurrent_per_key=1)
    async with gateway_stack(tmp_path, access=access, quota=quota) as stack:
        with pytest.raises(openai.AuthenticationError):
            await stack.client.with_options(api_key="wrong").models.list()
        stack.mesh.go.clear()
        running = asyncio.create_task(
            stack.client.completions.create(model=MODEL, prompt="a", max_tokens=5)
        )
        await stack.mesh.until(lambda: len(stack.mesh.workers["d1"].running) == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await stack.client.completions.create(model=MODEL, prompt="a")
        assert caught.value.response.headers["x-kvmesh-refusal"] == "gateway-quota"
        assert caught.value.response.headers["retry-after"] == "1"
        # Another key has its own quota.
        other = asyncio.create_task(
            stack.client.with_options(api_key="other").completions.create(
                model=MODEL, prompt="a", max_tokens=5
            )
        )
        await stack.mesh.until(lambda: len(stack.mesh.workers["d1"].running) == 2)
        stack.mesh.go.set()
        assert (await running).choices[0].finish_reason == "length"
        assert (await other).choices[0].finish_reason == "length"


async def test_drain_finishes_streams_and_refuses_new_ones(stack: Stack) -> None:
    stack.mesh.go.clear()
    running = asyncio.create_task(stack.client.chat.completions.create(model=MODEL, messages=HELLO))
    await stack.mesh.until(lambda: len(stack.mesh.workers["d1"].running) == 1)
    drain = asyncio.create_task(stack.context.drain(30.0))
    await stack.mesh.until(lambda: stack.gateway.admission.draining)
    with pytest.raises(openai.InternalServerError) as caught:
        await stack.client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.response.headers["x-kvmesh-refusal"] == "gateway-draining"
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.get("/ready") as response,
    ):
        assert response.status == 503
    assert not drain.done()
    stack.mesh.go.set()
    assert (await running).choices[0].message.content == "one request, one handoff"
    await drain


async def test_no_workers_known(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, {"p1": Role.PREFILL, **PAIR}) as stack:
        stack.mesh.hidden = True
        seen = stack.mesh.fleet_seen
        stack.mesh.changed.set()
        await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)
        async with aiohttp.ClientSession(stack.url) as session:
            while True:
                async with session.get("/ready") as response:
                    if response.status == 503:
                        break
        with pytest.raises(openai.InternalServerError) as caught:
            await stack.client.completions.create(
                model=MODEL, prompt="a", extra_headers={"x-slo-ttft-ms": "1000"}
            )
        assert caught.value.response.headers["x-kvmesh-refusal"] == "gateway-no_workers"


async def test_the_scheduler_is_told_of_all_that_wait_also_of_those_behind(stack: Stack) -> None:
    """Few look for workers at a time; whoever decides on roles has to know of the others, too."""
    stack.mesh.workers["p1"].does.reject_offers = -1
    count = 12
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    async with aiohttp.ClientSession(stack.url) as session:
        asked = [
            asyncio.create_task(session.post("/v1/completions", json=body)) for _ in range(count)
        ]

        def all_are_told() -> bool:
            told = [(each.waiting, each.waiting_reserved) for each in stack.mesh.queries]
            # With a reservation, or behind one that has: all of them wait for prefill.
            return any(told_of == (count, count) for told_of in told)

        await stack.mesh.until(all_are_told)
        stack.mesh.workers["p1"].does.reject_offers = 0
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
    await stack.idle()


async def test_a_prompt_that_would_be_late_does_not_wait(stack: Stack) -> None:
    late = Refusal(RefusalReason.DEADLINE, "its first token is expected late", retry_after_ms=1500)
    stack.mesh.refuse_routes = late
    with pytest.raises(openai.InternalServerError, match="is expected late") as caught:
        await stack.client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_headers={"x-slo-ttft-ms": "60000"}
        )
    assert caught.value.response.headers["x-kvmesh-refusal"] == "scheduler-deadline"
    assert caught.value.response.headers["retry-after"] == "2"
    assert len(stack.mesh.queries) == 1
    await stack.idle()
