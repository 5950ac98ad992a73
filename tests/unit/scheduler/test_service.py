from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.rpc.convert_worker import worker_info_to_proto
from kvmesh.rpc.direct import DirectListener
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest
from services.scheduler.config import FleetConfig
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.service import SchedulerServicer
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.parts import Parts


class Context:
    """What the servicer uses of a gRPC context."""

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        pass


@pytest.mark.parametrize("closes", [False, True])
async def test_closing_service_does_not_take_its_workers_for_lost(closes: bool) -> None:
    parts = Parts(Fleet(3.0))
    fleet, feed = parts.fleet, FleetFeed(parts.fleet)
    servicer = SchedulerServicer(
        fleet, feed, parts.router, FleetConfig(), parts.clock, DirectListener()
    )
    stream_ends = asyncio.Event()

    async def requests() -> AsyncIterator[RegisterWorkerRequest]:
        yield RegisterWorkerRequest(info=worker_info_to_proto(worker_info("p")))
        await stream_ends.wait()

    context: Any = Context()
    orders = servicer.RegisterWorker(requests(), context)
    assert (await anext(orders)).WhichOneof("order") == "accepted"
    if closes:
        servicer.close()
    stream_ends.set()
    assert [order async for order in orders] == []
    assert len(fleet) == (1 if closes else 0)
