"""A worker refuses whom it, or those who decode there, would get tokens later than accepted."""

from __future__ import annotations

import math

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
