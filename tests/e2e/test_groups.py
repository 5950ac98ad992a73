"""Groups of workers in real processes: what one group goes through is no other one's business."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import pytest

from tests.e2e.api_client import ApiClient
from tests.e2e.test_live_policies import tokens
from tests.mesh_processes import Flags, running_mesh

CHAT = ("prefill-0", "decode-0", "decode-1")
DOC = ("prefill-1", "decode-2", "decode-3")
STEP_S = {"prefill-0": 0.5, "decode-0": 0.05, "decode-1": 0.05} | dict.fromkeys(DOC, 0.8)
"""Long beside what a busy machine adds to a request; doc's decode workers are no quick help."""

PROMPT_TOKENS, ANSWER_TOKENS = 400, 4
NUM_ASKED = 12
NUM_DOC_CLIENTS = 20
"""Two of them keep the group's only prefill worker busy: this is ten times its load."""


def flags(policy: str) -> dict[str, Flags]:
    scenarios = {
        name: {
            "worker.scenario": scenario,
            "engine.fake-step-s": STEP_S[name],
        }
        for scenario, members in (("chat", CHAT), ("doc", DOC))
        for name in members
    }
    scheduler = {
        "routing.policy": policy,
        "routing.aggregate-tokens": 256,
        "planning.roles": "apply",
        "planning.monitor-s": 3.0,
    }
    return {
        "scheduler": scheduler,
        "gateway": {"limits.ttft-deadline-ms": 60_000},
        **scenarios,
    }


async def ask(client: ApiClient, scenario: str, seed: int) -> tuple[float, set[str]]:
    """Seconds until a request has its answer, and the workers that served it."""
    started = time.monotonic()
    answer = await client.streamed(
        tokens(PROMPT_TOKENS, seed),
        headers={"x-kvmesh-scenario": scenario},
        max_tokens=ANSWER_TOKENS,
    )
    assert answer.ok, answer.error
    assert not answer.headers["x-kvmesh-decision"].startswith("no_pair"), "its roles are its own"
    return time.monotonic() - started, {answer.prefill_worker, answer.decode_worker}


async def one_after_the_other(client: ApiClient, seeds: itertools.count[int]) -> list[float]:
    """How long each of chat's requests takes."""
    times = []
    for _ in range(NUM_ASKED):
        took_s, workers = await ask(client, "chat", next(seeds))
        assert workers <= set(CHAT)
        times.append(took_s)
    return times


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "kvmesh",
        pytest.param("joint", marks=pytest.mark.long),
        pytest.param("pdserve", marks=pytest.mark.long),
    ],
)
async def test_a_group_at_ten_times_its_load_is_not_noticed_by_another(
    policy: str, tmp_path: Path
) -> None:
    draw = random.Random(policy)
    seeds = itertools.count(draw.randrange(10**6))
    async with (
        running_mesh(tmp_path, 2, 4, flags=flags(policy)) as mesh,
        ApiClient(mesh.url) as client,
    ):
        alone = await one_after_the_other(client, seeds)
        stop = asyncio.Event()
        served: list[float] = []

        async def reader_of_documents() -> None:
            while not stop.is_set():
                took_s, workers = await ask(client, "doc", next(seeds))
                assert workers <= set(DOC)
                served.append(took_s)

        async with asyncio.TaskGroup() as readers:
            for _ in range(NUM_DOC_CLIENTS):
                readers.create_task(reader_of_documents())
            try:
                while not served:
                    await ask(client, "chat", next(seeds))
                beside = await one_after_the_other(client, seeds)
            finally:
                stop.set()
        alone += await one_after_the_other(client, seeds)
        await mesh.idle()
    assert max(served) > 4 * max(beside), "group doc is overloaded"
    assert max(beside) <= 1.2 * max(alone), (beside, alone)
