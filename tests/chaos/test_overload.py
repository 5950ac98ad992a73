"""More requests than capacity: some are served, the others get one honest refusal in time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from pathlib import Path

import pytest

from tests.chaos.load import a_prompt
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import fake_tokens, running_mesh

DEADLINE_S = 1.5
PREFILL_S = 0.3
NUM_REQUESTS = 20


async def test_twenty_requests_for_one_prefill_slot(tmp_path: Path) -> None:
    flags = {"prefill": {"engine.fake-step-s": PREFILL_S}, "decode": {"engine.fake-step-s": 0.01}}
    async with running_mesh(tmp_path, 1, 1, flags=flags) as mesh, ApiClient(mesh.url) as client:
        headers = {"x-slo-ttft-ms": str(round(DEADLINE_S * 1000))}
        prompts = [list(range(10 + i, 60 + i)) for i in range(NUM_REQUESTS)]
        answers = await asyncio.gather(
            *(client.streamed(prompt, headers=headers, max_tokens=5) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.waited_s < 2 * DEADLINE_S + 1.0
            if answer.status == 200:
                assert answer.token_ids == fake_tokens(prompt, 5)
                continue
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.headers["x-kvmesh-refusal"] == "prefill-busy"
            assert answer.error is not None
            assert answer.error["code"] == "busy"
        served = sum(answer.ok for answer in answers)
        assert 2 <= served <= DEADLINE_S / PREFILL_S + 1
        await mesh.idle()
        prefill = await mesh["prefill-0"].metrics()
        assert prefill.value("kvmesh_prefill_offers_total", outcome="accepted") >= served
        spans = [
            json.loads(line) for path in mesh.trace_files for line in path.read_text().splitlines()
        ]
    check_one_at_a_time([span for span in spans if span["name"] == "prefill.request"])
    check_refusals_are_traced([span for span in spans if span["name"] == "gateway.offer"], served)


async def test_answers_of_several_choices_are_whole_or_refused(tmp_path: Path) -> None:
    flags = {"prefill": {"engine.fake-step-s": 0.1}, "decode": {"engine.fake-step-s": 0.01}}
    async with running_mesh(tmp_path, 1, 1, flags=flags) as mesh, ApiClient(mesh.url) as client:
        headers = {"x-slo-ttft-ms": "4000"}
        prompts = [list(range(10 + i, 60 + i)) for i in range(NUM_REQUESTS)]
        answers = await asyncio.gather(
            *(client.streamed(each, headers=headers, max_tokens=5, n=3) for each in prompts)
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.status == 503:
                assert int(answer.headers["Retry-After"]) >= 1
                assert answer.choices == {}
                continue
            assert answer.ok, answer.error
            found = [answer.choices[index].token_ids for index in range(3)]
            assert found == [fake_tokens(prompt, 5)] * 3
        assert 1 <= sum(answer.ok for answer in answers) < NUM_REQUESTS
        await mesh.idle()


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["roles", "hybrids"])
async def test_prompts_that_would_be_late_are_refused_at_once(
    tmp_path: Path, num_prefill: int
) -> None:
    """By the scheduler, from the measured speed of real engines; others get the same tokens."""
    draw = random.Random(3)

    def prompt() -> list[int]:
        return a_prompt(draw, 400, 450)

    flags = {} if num_prefill else {"decode": {"worker.role": "hybrid"}}
    async with (
        running_mesh(tmp_path, num_prefill, 1, engine="kvmesh", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        waits: list[float] = []
        ends_at = time.monotonic() + 4.0  # speeds are measured once a second
        while time.monotonic() < ends_at:
            waits.append((await client.streamed(prompt(), max_tokens=1)).waited_s)
        limit_s = 4 * sorted(waits)[len(waits) // 2]
        headers = {"x-slo-ttft-ms": str(round(1000 * limit_s))}
        prompts = [prompt() for _ in range(NUM_REQUESTS)]
        answers = await asyncio.gather(
            *(client.streamed(each, headers=headers, max_tokens=5) for each in prompts)
        )
        refused = [each for each in answers if not each.ok]
        assert {each.status for each in refused} == {503}
        early = [a for a in refused if a.headers["x-kvmesh-refusal"] == "scheduler-deadline"]
        assert early
        assert all(int(each.headers["Retry-After"]) >= 1 for each in early)
        assert min(each.waited_s for each in early) < limit_s / 2
        assert any(each.ok for each in answers)
        await mesh.idle()
        for asked, answer in zip(prompts, answers, strict=True):
            if answer.ok:
                again = await client.streamed(asked, max_tokens=5, cache_salt="alone")
                assert answer.token_ids == again.token_ids
        await mesh.idle()


def check_one_at_a_time(spans: list[dict[str, object]]) -> None:
    """The worker never held more than its one slot."""
    held = sorted(
        (span["start_ns"], span["end_ns"])
        for span in spans
        if any(event["name"] == "accepted" for event in span["events"])  # type: ignore[attr-defined]
    )
    for (_, end), (start, _) in itertools.pairwise(held):
        assert end <= start  # type: ignore[operator]


def check_refusals_are_traced(spans: list[dict[str, object]], served: int) -> None:
    """Each request that was refused shows all its refusals, with worker and reason."""
    refused = [span for span in spans if "worker" not in span["attributes"]]  # type: ignore[operator]
    assert len(refused) == NUM_REQUESTS - served
    for span in refused:
        events = span["events"]
        assert isinstance(events, list)
        assert events
        reasons = [event["attributes"]["reason"] for event in events]
        assert reasons[0] == "busy"
        assert set(reasons) <= {"busy", "deadline"}  # the last answer may come too late
        assert {event["attributes"]["worker"] for event in events} == {"prefill-0"}
