from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.convert_worker import worker_info_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest
from services.scheduler.config import FleetConfig
from services.scheduler.feed import FleetFeed
from services.scheduler.registrations import Orders, Registrations
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.parts import Parts


@pytest.mark.parametrize("closes", [False, True])
async def test_a_closing_service_does_not_take_its_workers_for_lost(closes: bool) -> None:
    parts = Parts()
    registrations = Registrations(parts.fleet, FleetFeed(parts.fleet), FleetConfig(), parts.clock)
    stream_ends = asyncio.Event()

    async def requests() -> AsyncIterator[RegisterWorkerRequest]:
        yield RegisterWorkerRequest(info=worker_info_to_proto(worker_info("p")))
        await stream_ends.wait()

    orders: Orders = Outbox()
    following = asyncio.create_task(registrations.follow(requests(), orders))
    heard = aiter(orders)
    assert (await anext(heard)).WhichOneof("order") == "accepted"
    assert registrations.give_role(WorkerId("p"), Role.DECODE, "a test")
    assert (await anext(heard)).role.reason == "a test"
    if closes:
        registrations.close()
    stream_ends.set()
    assert [order async for order in heard] == []
    assert await following is None
    assert len(parts.fleet) == (1 if closes else 0)
    assert not registrations.give_role(WorkerId("p"), Role.DECODE, "nobody hears it")
