from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvmesh.cli.probes import free_ports
from kvmesh.rpc import fleet, stream
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.rpc.stream import PeerStream
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest, RegisterWorkerResponse
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.waiting import until


@pytest.fixture
def target() -> str:
    [port] = free_ports("127.0.0.1", 1)
    return f"127.0.0.1:{port}"


async def _said(work: Coroutine[Any, Any, None], event: str, log: pytest.LogCaptureFixture) -> None:
    """Runs until the log has the event."""
    running = asyncio.create_task(work)
    try:
        await until(lambda: event in log.text, f"the log says {event}")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert log.text.count(event) == 1
    [record] = [each for each in log.records if event in each.getMessage()]
    assert record.levelname == "WARNING"


async def test_a_worker_says_that_no_scheduler_is_there(
    target: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "UNREACHABLE_AFTER", 2)
    async with open_channel(target) as channel:
        open_call = SchedulerServiceStub(channel).RegisterWorker
        peer: PeerStream[RegisterWorkerRequest, RegisterWorkerResponse]
        peer = PeerStream("scheduler@nowhere", open_call, lambda _: None)
        await _said(peer.run(), "peer_unreachable", caplog)
    assert not peer.connected


async def test_a_gateway_says_that_no_scheduler_is_there(
    target: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "UNREACHABLE_AFTER", 2)
    watch = FleetWatch([target])
    await _said(watch.run(), "scheduler_unreachable", caplog)
    assert not watch.fresh
