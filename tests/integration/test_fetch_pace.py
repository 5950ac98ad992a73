"""From the links that workers show to what a route decides: a slow link turns fetching off."""

from __future__ import annotations

import random
import time

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.turns import at_once
from kvmesh.core.types import PrefixSource
from kvmesh.policy import path_meter
from kvmesh.policy.path_meter import PathMeter
from kvmesh.policy.prefix_source import saved_tokens
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from tests.faulty_link import Faults, faulty_link
from tests.mesh_processes import BLOCK_SIZE, MODEL_FOLDER, VOCAB_SIZE
from tests.worker_driver import Key, driving, make_spec, running_worker, until_idle

NUM_BLOCKS = 60
PAUSE_S = 0.02
"""Of the link, there and again back."""

PROMPT = [random.Random(9).randrange(3, VOCAB_SIZE) for _ in range(NUM_BLOCKS * BLOCK_SIZE + 1)]


def shown(worker: Worker) -> FleetWorker:
    return FleetWorker(worker._info, worker.load(), worker.detail())


async def test_a_link_that_is_slower_than_computing_is_not_fetched_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path_meter, "MIN_BYTES", 1)  # blocks of the fake are small
    engine = EngineSection(kind="fake", model=str(MODEL_FOLDER), max_batch_tokens=512)
    faults = Faults(delay_s=PAUSE_S)
    async with (
        running_worker(WorkerSection(id="holder", channels="tcp"), engine) as holder,
        running_worker(WorkerSection(id="reader", channels="tcp"), engine) as reader,
        driving(holder, reader) as driver,
    ):
        await driver.generate(holder, holder, Key("prime"), make_spec(PROMPT, max_tokens=1))
        await until_idle(holder)
        assert holder.pool.data_endpoint is not None
        async with faulty_link(holder.pool.data_endpoint, faults) as link:
            holder.pool.data_endpoint = link
            info = holder._info
            source = PrefixSource(
                info.worker_id, info.incarnation, info.control_endpoint, NUM_BLOCKS
            )
            began = time.monotonic()
            await driver.generate_from(source, reader, reader, make_spec(PROMPT, max_tokens=1))
            seconds = time.monotonic() - began
        meter = PathMeter()
        at_once(meter.observe([shown(holder), shown(reader)]))
        travel_s = meter.pace(None).inside_token_s
        num_tokens = NUM_BLOCKS * BLOCK_SIZE
        # However fast the machine is, the link is not; and the lease is not the link's.
        assert PAUSE_S / num_tokens < travel_s <= seconds / num_tokens
        slower, faster = meter.pace(token_s=2 * travel_s), meter.pace(token_s=0.9 * travel_s)
        fetched, computed = (
            saved_tokens(num_tokens, 0, pace.overhead_tokens, pace.inside_share)
            for pace in (slower, faster)
        )
        assert fetched > 0 == computed
        await until_idle(holder, reader)
