"""The long-lived stream's client end against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from kvmesh.core.errors import ConfigError, LostError
from kvmesh.rpc.channels import bind_server, make_server, open_channel
from kvmesh.rpc.correlator import Correlator
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.stream import PeerStream
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1.kv_manager_service_pb2_grpc import (
    KvManagerServiceServicer,
    KvManagerServiceStub,
    add_KvManagerServiceServicer_to_server,
)

Stream = PeerStream[pb.MatchPrefixRequest, pb.MatchPrefixResponse]


class Echo(KvManagerServiceServicer):
    """Answers every question with its number; number 13 gets none."""

    async def Publish(
        self,
        request_iterator: AsyncIterator[pb.PublishRequest],
        context: grpc.aio.ServicerContext[pb.PublishRequest, pb.PublishResponse],
    ) -> AsyncIterator[pb.PublishResponse]:
        async for _ in request_iterator:
            yield pb.PublishResponse()

    async def WatchPrefixes(
        self,
        request_iterator: AsyncIterator[pb.WatchPrefixesRequest],
        context: grpc.aio.ServicerContext[pb.WatchPrefixesRequest, pb.WatchPrefixesResponse],
    ) -> AsyncIterator[pb.WatchPrefixesResponse]:
        async for _ in request_iterator:
            yield pb.WatchPrefixesResponse()

    async def MatchPrefix(
        self,
        request_iterator: AsyncIterator[pb.MatchPrefixRequest],
        context: grpc.aio.ServicerContext[pb.MatchPrefixRequest, pb.MatchPrefixResponse],
    ) -> AsyncIterator[pb.MatchPrefixResponse]:
        await context.send_initial_metadata(())
        async for request in request_iterator:
            if request.correlation_id != 13:
                yield pb.MatchPrefixResponse(correlation_id=request.correlation_id)


@asynccontextmanager
async def echo_server(port: int = 0) -> AsyncIterator[int]:
    server = make_server()
    bound = bind_server(server, "127.0.0.1", port)
    add_KvManagerServiceServicer_to_server(Echo(), server)
    await server.start()
    yield bound
    await server.stop(0)


class Peer:
    """A stream with a correlator on it, and what it saw."""

    def __init__(self, port: int) -> None:
        self.channel = open_channel(f"127.0.0.1:{port}")
        self.correlator: Correlator[pb.MatchPrefixRequest, pb.MatchPrefixResponse] = Correlator(
            lambda answer: answer.correlation_id
        )
        self.ups = 0
        self.downs: list[str] = []
        self.down = asyncio.Event()
        self.stream: Stream = PeerStream(
            "echo",
            KvManagerServiceStub(self.channel).MatchPrefix,
            self.correlator.receive,
            on_up=self._count_up,
            on_down=self._went_down,
        )
        self.task = asyncio.create_task(self.stream.run())

    def _count_up(self) -> None:
        self.ups += 1

    def _went_down(self, reason: str) -> None:
        self.downs.append(reason)
        self.correlator.fail_all(reason)
        self.down.set()

    async def ask(self, number: int, timeout_s: float = 5.0) -> int:
        answer = await self.correlator.ask(
            self.stream, number, pb.MatchPrefixRequest(correlation_id=number), timeout_s
        )
        return answer.correlation_id

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.channel.close()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with echo_server() as bound:
        yield bound


async def test_answers_find_their_questions(port: int) -> None:
    peer = Peer(port)
    assert await peer.stream.wait_connected(5)
    assert await asyncio.gather(*(peer.ask(n) for n in range(20, 40))) == list(range(20, 40))
    assert peer.correlator.num_waiting == 0
    await peer.close()


async def test_a_question_without_an_answer_is_lost_and_forgotten(port: int) -> None:
    peer = Peer(port)
    assert await peer.stream.wait_connected(5)
    with pytest.raises(LostError, match="did not answer"):
        await peer.ask(13, timeout_s=0.05)
    assert peer.correlator.num_waiting == 0
    await peer.close()


async def test_a_peer_that_is_not_there_is_never_up() -> None:
    async with echo_server() as free:
        pass
    peer = Peer(free)
    assert not await peer.stream.wait_connected(0.5)
    with pytest.raises(LostError, match="no connection"):
        await peer.ask(1)
    assert peer.ups == 0
    assert peer.downs == []
    await peer.close()


async def test_a_restarted_peer_is_found_again_and_open_questions_end() -> None:
    async with echo_server() as port:
        peer = Peer(port)
        assert await peer.stream.wait_connected(5)
        waiting = asyncio.create_task(peer.ask(13, timeout_s=30))
        await peer.ask(1)
    await asyncio.wait_for(peer.down.wait(), 5)
    with pytest.raises(LostError):
        await waiting
    async with echo_server(port):
        assert await peer.stream.wait_connected(10)
        assert await peer.ask(2) == 2
        assert peer.ups == 2
        await peer.close()


async def test_outbox_hands_out_all_that_is_queued_at_once() -> None:
    outbox: Outbox[int] = Outbox()
    for number in range(3):
        outbox.put(number)
    outbox.close()
    outbox.put(9)
    assert [batch async for batch in outbox.batches()] == [[0, 1, 2]]


async def test_a_taken_port_is_a_clear_error(port: int) -> None:
    server = make_server()
    with pytest.raises(ConfigError, match=r"--server\.port"):
        bind_server(server, "127.0.0.1", port)
