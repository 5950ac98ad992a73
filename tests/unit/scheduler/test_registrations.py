from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.convert_worker import worker_info_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest
from services.scheduler.config import FleetConfig
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet, Membership
from services.scheduler.registrations import Orders, Registrations, WorkerStream
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.parts import Parts

LEASE_S = 3.0


@pytest.mark.parametrize("closes", [False, True])
async def test_a_closing_service_does_not_take_its_workers_for_lost(closes: bool) -> None:
    parts = Parts()
    registrations = Registrations(
        parts.fleet, FleetFeed(parts.fleet), FleetConfig(), parts.clock, EmptySpares()
    )
    stream_ends = asyncio.Event()

    async def requests() -> AsyncIterator[RegisterWorkerRequest]:
        yield RegisterWorkerRequest(info=worker_info_to_proto(worker_info("p")))
        await stream_ends.wait()

    orders: Orders = Outbox()
    stream = WorkerStream(orders)
    following = asyncio.create_task(registrations.follow(requests(), stream))
    heard = aiter(orders)
    assert (await anext(heard)).WhichOneof("order") == "accepted"
    assert registrations.give_role(WorkerId("p"), Role.DECODE, "a test")
    assert (await anext(heard)).role.reason == "a test"
    if closes:
        registrations.close()
    stream_ends.set()
    assert [order async for order in heard] == []
    await following
    assert stream.refusal is None
    assert len(parts.fleet) == (1 if closes else 0)
    assert not registrations.give_role(WorkerId("p"), Role.DECODE, "nobody hears it")


async def test_a_scheduler_that_stood_still_reads_first_what_workers_said_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(Fleet(LEASE_S))
    config = FleetConfig(lease_s=LEASE_S)
    registrations = Registrations(
        parts.fleet, FleetFeed(parts.fleet), config, parts.clock, EmptySpares()
    )
    assert isinstance(parts.fleet.register(worker_info("p"), parts.clock.now()), Membership)
    pauses = iter((10 * LEASE_S, LEASE_S / 6))
    left: list[int] = []

    async def sleep(pause_s: float) -> None:
        left.append(len(parts.fleet))
        try:
            parts.clock.advance(next(pauses))
        except StopIteration:
            raise asyncio.CancelledError from None

    monkeypatch.setattr("services.scheduler.registrations.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await registrations.expire_leases()
    assert left == [1, 1, 0]
