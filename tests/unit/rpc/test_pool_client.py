"""Connections of the caller's end of the pool service; the other end is not there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from kvmesh.core.types import Endpoint
from kvmesh.rpc import pool_client
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.v1 import kv_pool_service_pb2 as pb


@dataclass
class Channel:
    """Closes when it may."""

    may_close: asyncio.Event
    is_closed: bool = False

    async def close(self) -> None:
        await self.may_close.wait()
        assert not self.is_closed, "closed twice"
        self.is_closed = True


@dataclass
class Stub:
    """Leases at once, on an open channel."""

    channel: Channel

    async def LeaseBlocks(
        self, request: pb.LeaseBlocksRequest, timeout: float
    ) -> pb.LeaseBlocksResponse:
        await asyncio.sleep(0)
        assert not self.channel.is_closed, "closed under a call"
        return pb.LeaseBlocksResponse(lease=pb.ReadLease(lease_id=1))


@dataclass
class Mesh:
    """All channels that were opened."""

    may_close: asyncio.Event = field(default_factory=asyncio.Event)
    opened: list[Channel] = field(default_factory=list)

    def open(self, _target: str, _tls: object) -> Channel:
        self.opened.append(Channel(self.may_close))
        return self.opened[-1]

    @property
    def num_open(self) -> int:
        return sum(not channel.is_closed for channel in self.opened)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    mesh = Mesh()
    monkeypatch.setattr(pool_client, "open_channel", mesh.open)
    monkeypatch.setattr(pool_client, "KvPoolServiceStub", Stub)
    return mesh


async def lease(client: PoolClient, port: int) -> None:
    message = await client.lease(Endpoint("holder", port), pb.LeaseBlocksRequest(), 5)
    assert message.lease_id == 1


async def test_connections_that_were_not_used_for_longest_are_closed(mesh: Mesh) -> None:
    client = PoolClient()
    mesh.may_close.set()
    for port in range(pool_client.MAX_CHANNELS + 3):
        await lease(client, port)
    assert [channel.is_closed for channel in mesh.opened[:4]] == [True, True, True, False]
    assert mesh.num_open == pool_client.MAX_CHANNELS
    await client.close()
    assert mesh.num_open == 0


async def test_calls_at_once_close_each_connection_once_and_none_in_use(mesh: Mesh) -> None:
    client = PoolClient()
    for port in range(pool_client.MAX_CHANNELS):
        await lease(client, port)
    # Three more at once have to close the first three; meanwhile those are asked again.
    calls = [asyncio.create_task(lease(client, 1000 + number)) for number in range(3)]
    await asyncio.sleep(0)
    calls += [asyncio.create_task(lease(client, port)) for port in range(3)]
    await asyncio.sleep(0)
    mesh.may_close.set()
    await asyncio.gather(*calls)
    await client.close()
    assert mesh.num_open == 0
