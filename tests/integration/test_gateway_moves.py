"""What the gateway does when workers or schedulers are lost: no token is lost or repeated."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvmesh.core.types import Placement, Role
from kvmesh.policy.answer_times import MAX_WAIT_S
from tests.integration.gateway_fake_worker import LAYOUT, MODEL, Behaviour
from tests.integration.gateway_stack import PAIR, TWO_PAIRS, Stack, gateway_stack

SAYS = "the mesh moves blocks from prefill to decode and the stream goes on"


async def stream_text(stack: Stack, **fields: Any) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason of a streamed completion."""
    fields = {"max_tokens": 400, "seed": 7} | fields
    stream = await stack.client.completions.create(
        model=MODEL, prompt="a", stream=True, extra_body={"return_token_ids": True}, **fields
    )
    text, token_ids, reason = "", [], None
    async for chunk in stream:
        (choice,) = chunk.choices
        text += choice.text
        token_ids += (choice.model_extra or {}).get("token_ids", [])
        reason = choice.finish_reason
    return text, token_ids, reason


async def moves(stack: Stack, reason: str) -> float:
    return stack.gateway.metrics.value("kvmesh_gateway_moves_total", reason=reason)


@pytest.mark.parametrize(
    ("worker", "behaviour", "reason"),
    [
        ("d1", {"break_decode_after": 3}, "decode_failed"),
        ("d1", {"fail_decode_after": 3}, "decode_failed"),
        ("d1", {"stall_decode_after": 3}, "decode_stalled"),
        ("p1", {"fail_prefills": 1}, "prefill_failed"),
    ],
)
async def test_stream_moves(
    tmp_path: Path, worker: str, behaviour: dict[str, Any], reason: str
) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"stall_s": 1.0}) as stack:
        stack.mesh.workers[worker].does = Behaviour(**behaviour)
        text, token_ids, finish = await stream_text(stack)
        assert text == SAYS
        assert token_ids == [*stack.mesh.output, stack.mesh.eos]
        assert finish == "stop"
        assert await moves(stack, reason) == 1
        assert stack.mesh.queries[-1].avoid == {worker}
        await stack.idle()


async def test_a_decode_worker_stalls_whose_tokens_overtook_the_handoff(tmp_path: Path) -> None:
    """It is lost after `stall_s`, as any other, and not after the longer wait for a handoff."""
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"stall_s": 1.0}) as stack:
        prefill, decode = stack.mesh.workers["p1"], stack.mesh.workers["d1"]
        prefill.does = Behaviour(first_waits=True, silent_handoff=True)
        decode.does.stall_decode_after = 3
        stack.mesh.go.clear()
        asked = asyncio.create_task(stream_text(stack))
        await stack.mesh.until(lambda: len(prefill.prefilling) == 1)
        await asyncio.sleep(MAX_WAIT_S + 0.5)  # the timer of the question has passed
        stack.mesh.go.set()
        async with asyncio.timeout(30):
            assert (await asked)[0] == SAYS
        assert await moves(stack, "decode_stalled") == 1
        await stack.idle()


async def test_moved_sequence_is_prompt_plus_tokens(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        stack.mesh.workers["d1"].does.break_decode_after = 3
        await stream_text(stack)
        specs = [spec for name in ("p1", "p2") for spec in stack.mesh.workers[name].specs]
        before, after = sorted(specs, key=lambda spec: len(spec.token_ids))
        assert after.num_prompt_tokens == before.num_prompt_tokens == len(before.token_ids)
        # All 4 tokens, unless the break of one stream overtook a token on the other: then those are
        # computed again.
        kept = len(after.token_ids) - len(before.token_ids)
        assert kept <= 4
        assert after.token_ids == before.token_ids + tuple(stack.mesh.output[:kept])
        assert after.sampling == before.sampling
        assert after.root_hash == before.root_hash
        # The limit counts from the client's prompt, so less is left to generate.
        left = [query.max_new_tokens for query in stack.mesh.queries]
        # A break before the prompt was accepted is no move: the first plan's next worker takes it.
        assert left == [400, 400 - kept] or (left, kept) == ([400], 0)


async def test_killed_worker_in_the_middle(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        victim = stack.mesh.workers["d1"]
        victim.does.stall_decode_after = 5
        asked = asyncio.create_task(stream_text(stack))
        await stack.mesh.until(lambda: len(victim.running) == 1)
        await victim.kill()
        text, token_ids, _ = await asked
        assert text == SAYS
        assert token_ids == [*stack.mesh.output, stack.mesh.eos]
        # It is gone for the next request as well: the second decode worker takes it.
        assert (await stream_text(stack))[0] == SAYS
        await stack.idle()


async def test_stop_string_over_a_move(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        stack.mesh.workers["d1"].does.break_decode_after = 4
        text, _, finish = await stream_text(stack, stop=" to decode")
        assert text == "the mesh moves blocks from prefill"
        assert finish == "stop"
        await stack.idle()


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("fault", ["break_decode_after", "fail_decode_after", "fail_prefills"])
async def test_aggregated_stream_moves(tmp_path: Path, fault: str, starts: bool) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        stack.mesh.placement = Placement.AGGREGATED
        for worker in stack.mesh.workers.values():
            worker.does.starts = starts
        setattr(stack.mesh.workers["p1"].does, fault, 3 if fault != "fail_prefills" else 1)
        assert (await stream_text(stack))[0] == SAYS
        # One that only reserves is offered the prompt for the blocks that it holds.
        reserves = [len(stack.mesh.workers[name].reserves) for name in ("p1", "p2")]
        assert reserves == [1, 1]
        await stack.idle()


@pytest.mark.parametrize("refusal", ["reject_offers", "refuse_reserves"])
async def test_an_aggregated_request_goes_to_the_next_worker(tmp_path: Path, refusal: str) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        stack.mesh.placement = Placement.AGGREGATED
        setattr(stack.mesh.workers["p1"].does, refusal, 1)
        assert (await stream_text(stack))[0] == SAYS
        assert [len(stack.mesh.workers[name].started) for name in ("p1", "p2")] == [0, 1]
        stage = "prefill" if refusal == "reject_offers" else "decode"
        reason = "busy" if refusal == "reject_offers" else "no_slots"
        assert stack.gateway.metrics.refusals() == {(stage, reason): 1}
        await stack.idle()


@pytest.mark.parametrize(
    "behaviour", [{"repeat_tokens": True}, {"tokens_per_message": 3}, {"decode_first": True}]
)
async def test_odd_but_valid_token_messages(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    async with gateway_stack(tmp_path, PAIR, SAYS) as stack:
        for worker in stack.mesh.workers.values():
            worker.does = Behaviour(**behaviour)
        text, token_ids, _ = await stream_text(stack)
        assert text == SAYS
        assert token_ids == [*stack.mesh.output, stack.mesh.eos]
        await stack.idle()


async def test_lost_too_often_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"max_moves": 1}) as stack:
        for name in ("d1", "d2"):
            # Always: a stream may come back to a worker that broke, if the other is not connected.
            stack.mesh.workers[name].does.break_decode_after = 2
            stack.mesh.workers[name].does.break_always = True
        body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 400}
        async with (
            aiohttp.ClientSession(stack.url) as session,
            session.post("/v1/completions", json=body) as response,
        ):
            events = (await response.text()).split("\n\n")
        error = json.loads(events[-3].removeprefix("data: "))["error"]
        assert "lost 2 times" in error["message"]
        assert events[-2] == "data: [DONE]"
        await stack.idle()


async def test_lost_too_often_raises_in_the_openai_client(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits={"max_moves": 1}) as stack:
        for name in ("d1", "d2"):
            # Always: a stream may come back to a worker that broke, if the other is not connected.
            stack.mesh.workers[name].does.break_decode_after = 2
            stack.mesh.workers[name].does.break_always = True
        with pytest.raises(openai.APIError, match="lost 2 times"):
            await stream_text(stack)


async def test_prefill_lost_too_often(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, PAIR, SAYS, limits={"max_moves": 2}) as stack:
        stack.mesh.workers["p1"].does.fail_prefills = -1
        with pytest.raises(openai.InternalServerError) as caught:
            await stack.client.completions.create(model=MODEL, prompt="a")
        assert caught.value.response.status_code == 502
        assert len(stack.mesh.workers["p1"].offers) == 3
        await stack.idle()


async def test_request_timeout(tmp_path: Path) -> None:
    limits = {"request_timeout_s": 0.2}
    async with gateway_stack(tmp_path, PAIR, SAYS, limits=limits) as stack:
        stack.mesh.go.clear()
        with pytest.raises(openai.InternalServerError) as caught:
            await stack.client.completions.create(model=MODEL, prompt="a")
        assert caught.value.response.status_code == 504
        await stack.idle()


async def test_goes_on_without_a_scheduler(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS) as stack:
        await stack.mesh.stop_scheduler()
        num_queries = len(stack.mesh.queries)
        assert (await stream_text(stack))[0] == SAYS
        assert len(stack.mesh.queries) == num_queries
        await stack.idle()


async def _two_checkpoints(stack: Stack, newer: set[str]) -> None:
    """Some workers have another checkpoint, and take nothing new for now."""
    for name in newer:
        worker = stack.mesh.workers[name]
        layout = replace(LAYOUT, model_fingerprint="another")
        worker.info = replace(worker.info, layout=layout)
    await _wake(stack, newer, awake=False)


async def _wake(stack: Stack, names: set[str], *, awake: bool) -> None:
    for name in names:
        stack.mesh.workers[name].load = replace(stack.mesh.workers[name].load, draining=not awake)
    seen = stack.mesh.fleet_seen
    stack.mesh.changed.set()
    await stack.mesh.until(lambda: stack.mesh.fleet_seen > seen)


async def test_a_stream_stays_with_its_checkpoint(tmp_path: Path) -> None:
    roles = TWO_PAIRS | {"d3": Role.DECODE}
    async with gateway_stack(tmp_path, roles, SAYS) as stack:
        await _two_checkpoints(stack, {"p2", "d2"})
        stack.mesh.workers["d1"].does.stall_decode_after = 5
        asked = asyncio.create_task(stream_text(stack))
        await stack.mesh.until(lambda: len(stack.mesh.workers["d1"].running) == 1)
        await _wake(stack, {"p2", "d2"}, awake=True)
        await stack.mesh.workers["d1"].kill()
        text, token_ids, _ = await asked
        assert text == SAYS
        assert token_ids == [*stack.mesh.output, stack.mesh.eos]
        assert {query.fingerprint for query in stack.mesh.queries} == {LAYOUT.model_fingerprint}
        assert not stack.mesh.workers["d2"].reserves
        assert stack.mesh.workers["d3"].reserves
        specs = stack.mesh.workers["p1"].specs
        assert {spec.fingerprint for spec in specs} == {LAYOUT.model_fingerprint}
        await stack.idle()


async def test_a_stream_ends_rather_than_go_on_with_another_checkpoint(tmp_path: Path) -> None:
    limits = {"ttft_deadline_ms": 500}
    async with gateway_stack(tmp_path, TWO_PAIRS, SAYS, limits=limits) as stack:
        await _two_checkpoints(stack, {"p2", "d2"})
        stack.mesh.workers["d1"].does.stall_decode_after = 5
        asked = asyncio.create_task(stream_text(stack))
        await stack.mesh.until(lambda: len(stack.mesh.workers["d1"].running) == 1)
        await _wake(stack, {"p2", "d2"}, awake=True)
        for name in ("d1", "p1"):
            await stack.mesh.workers.pop(name).kill()
        stack.mesh.changed.set()
        with pytest.raises(openai.APIError, match="checkpoint tiny-fingerprint"):
            await asked
        assert not stack.mesh.workers["d2"].reserves
        # A request without tokens is served by whoever is there.
        assert (await stream_text(stack))[0] == SAYS
        assert stack.mesh.queries[-1].fingerprint == "another"
        await stack.idle()
