"""Workers keep the limits on the time per token, and on the time between two tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.step_times import load_step_times
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from kvmesh.v1 import types_pb2
from tests.waiting import until
from tests.worker_driver import Driver, Key, driving, make_spec, running_worker

STEP_S = 0.02
ENGINE = EngineSection(kind="fake", fake_step_s=STEP_S)
LONG = 2000


async def decode(driver: Driver, worker: Worker, key: Key, tpot_ms: int) -> None:
    """Lets a sequence decode, for as long as the test does."""
    spec = make_spec([5, 6, 7], max_tokens=LONG)
    event = await driver.reserve(worker, key, spec, tpot_ms)
    assert event.HasField("reserved"), event
    await driver.offer(worker, key, spec, event.reserved)
    pace = worker.decode.pace
    await until(lambda: pace.room(0.0).pace.of(10) > 0.0, "a step has been measured")


async def test_limits_of_both_sides_are_kept() -> None:
    async with running_worker(WorkerSection(), ENGINE) as worker, driving(worker) as driver:
        hasty = make_spec([1, 2, 3])
        event = await driver.reserve(worker, Key("empty"), hasty, 1)
        assert event.HasField("reserved"), "nowhere would it be faster than where nobody decodes"
        driver.cancel_decode(worker, Key("empty"))
        await until(lambda: worker.is_idle)

        await decode(driver, worker, Key("runs"), 1000)
        room = worker.report().room
        assert room.strictest_s == 1.0
        assert 0.0 < room.spare_s < math.inf
        refused = await driver.reserve(worker, Key("hasty"), hasty, int(STEP_S * 500))
        assert refused.refused.reason == types_pb2.REFUSAL_REASON_NO_SLOTS
        assert "a token would take longer" in refused.refused.message
        for key, tpot_ms in ((Key("patient"), 1000), (Key("any"), 0)):
            event = await driver.reserve(worker, key, hasty, tpot_ms)
            assert event.HasField("reserved"), event


DECODE_S, PROMPT_TOKEN_S = 0.01, 2e-4
PROFILE = {
    "devices": {
        "device": {
            "prefill_s": {"quadratic": [0.0, PROMPT_TOKEN_S, 0.0]},
            "decode_s": {"constant": DECODE_S, "per_sequence": 0.0, "per_token": 0.0},
        }
    }
}
ITL_MS = 60
NUM_PROMPT = 3000


@pytest.mark.parametrize(("role", "itl_ms"), [("decode", 0), ("hybrid", 0), ("decode", ITL_MS)])
async def test_a_prompt_is_cut_into_parts_that_keep_the_time_between_two_tokens(
    role: str, itl_ms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    times = load_step_times(path, "device")
    engine = EngineSection(kind="fake", fake_profile=str(path), fake_device="device")
    steps: list[list[SequenceChunk]] = []
    section = WorkerSection(role=role)
    async with running_worker(section, engine) as worker, driving(worker) as driver:
        plan = worker.core.plan_step

        def recorded() -> list[SequenceChunk]:
            steps.append(plan())
            return steps[-1]

        monkeypatch.setattr(worker.core, "plan_step", recorded)
        # Steps beside little context would say nothing about steps beside a long prompt.
        spec = make_spec([each % 999 + 1 for each in range(1000)], max_tokens=LONG)
        event = await driver.reserve(worker, Key("decodes"), spec, itl_ms=itl_ms)
        await driver.offer(worker, Key("decodes"), spec, event.reserved)
        pace = worker.decode.pace
        await until(lambda: pace.room(0.0).pace.of(10) > 0.0, "a step has been measured")

        prompt = make_spec([each % 999 + 1 for each in range(NUM_PROMPT)])
        asked = await driver.start(worker, Key("prompt"), prompt)
        assert asked.prefill.WhichOneof("event") == "accepted", asked
        await driver.decode_event(Key("prompt"))  # its first token
    mixed = [
        times.of((chunk.start, chunk.end) for chunk in step)
        for step in steps
        if len(step) == 2 and any(chunk.end - chunk.start > 1 for chunk in step)
    ]
    if itl_ms:
        assert max(mixed) <= itl_ms / 1000
        assert len(mixed) < NUM_PROMPT / 32, "parts are as large as the limit allows"
    else:
        assert max(mixed) > ITL_MS / 1000, "without a limit, prompts get the rest of each step"


async def test_a_worker_that_has_seen_only_short_prompts_takes_a_long_one(tmp_path: Path) -> None:
    sequence_s, count, limit_ms = 0.01, 3, 100
    profile = json.loads(json.dumps(PROFILE))
    profile["devices"]["device"]["decode_s"]["per_sequence"] = sequence_s
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    engine = EngineSection(kind="fake", fake_profile=str(path), fake_device="device")
    async with running_worker(WorkerSection(), engine) as worker, driving(worker) as driver:
        for number in range(count):
            key, spec = Key(f"short {number}"), make_spec([5 + number, 6, 7], max_tokens=LONG)
            event = await driver.reserve(worker, key, spec, limit_ms)
            await driver.offer(worker, key, spec, event.reserved)
            await driver.decode_event(key)  # the prefill slot is free again
        batch_s = DECODE_S + 0.9 * sequence_s * count

        def knows_the_batch() -> bool:
            room = worker.report().room
            return room.pace.of(room.context_tokens) > batch_s

        await until(knows_the_batch, "steps of the whole batch were measured")
        room = worker.report().room
        assert room.context_tokens < 1000
        long = make_spec([each % 999 + 1 for each in range(8000)])
        event = await driver.reserve(worker, Key("long"), long, limit_ms)
        assert event.HasField("reserved"), event


async def test_no_prompt_is_welcome_where_not_even_a_small_part_keeps_the_limit() -> None:
    async with running_worker(WorkerSection(), ENGINE) as worker, driving(worker) as driver:
        spec = make_spec([5, 6, 7], max_tokens=LONG)
        event = await driver.reserve(worker, Key("runs"), spec, itl_ms=int(STEP_S * 1000))
        await driver.offer(worker, Key("runs"), spec, event.reserved)
        await until(lambda: worker.report().room.spare_s == 0.0, "no time is left for prompts")
        assert worker.report().room.strictest_s == STEP_S
