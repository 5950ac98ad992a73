from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import Placement
from kvmesh.policy.composition import COMPOSITIONS
from kvmesh.rpc.convert import worker_info_to_proto
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest
from services.scheduler.config import FleetConfig
from services.scheduler.decisions import DecisionLog
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.router import Router, RouterSettings
from services.scheduler.service import SchedulerServicer
from tests.unit.policy.fleet_examples import worker_info


class Context:
    """What the servicer uses of a gRPC context."""

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        pass


@pytest.mark.parametrize("closes", [False, True])
async def test_closing_service_does_not_take_its_workers_for_lost(closes: bool) -> None:
    clock = ManualClock()
    fleet = Fleet(3.0)
    feed = FleetFeed(fleet)
    settings = RouterSettings(COMPOSITIONS["kvmesh"], Placement.AUTO, 0.05)
    router = Router(fleet, settings, None, clock, DecisionLog(clock, 10))
    servicer = SchedulerServicer(fleet, feed, router, FleetConfig(), clock)
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
