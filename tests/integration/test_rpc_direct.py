"""Streams that leave gRPC for a socket of their own: a real server, a real client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvmesh.core.errors import ConfigError, LostError, ProtocolError
from kvmesh.core.newcomers import Newcomers
from kvmesh.rpc import direct
from kvmesh.rpc.channels import bind_server, make_server, open_channel
from kvmesh.rpc.correlator import Correlator
from kvmesh.rpc.direct import DirectClient, DirectListener
from kvmesh.rpc.framed import FramedConnection
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.served import DirectWay, serve_in_order, serve_questions
from kvmesh.rpc.stream import PeerStream
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc
from kvmesh.v1.kv_manager_service_pb2 import (
    BlockEvents,
    PublishAck,
    PublishRequest,
    PublishResponse,
)
from kvmesh.v1.kv_manager_service_pb2 import MatchPrefixRequest as Question
from kvmesh.v1.kv_manager_service_pb2 import MatchPrefixResponse as Answer
from tests.waiting import until

SILENT, BAD, BUG, UNREADABLE = 13, 14, 15, 16
"""Questions that get no answer, that are none, that the server trips over, and with an answer that
the client cannot read."""


@dataclass
class Echo(pb_grpc.KvManagerServiceServicer):
    """Answers with the question's number."""

    direct: DirectListener
    num_over_grpc: int = 0
    num_open: int = 0
    num_ended: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    may_acknowledge: asyncio.Event = field(default_factory=asyncio.Event)

    async def Publish(
        self,
        request_iterator: AsyncIterator[PublishRequest],
        context: grpc.aio.ServicerContext[PublishRequest, PublishResponse],
    ) -> AsyncIterator[PublishResponse]:
        way: DirectWay[PublishResponse] = DirectWay(self.direct, PublishRequest, iter)
        self.num_open += 1
        try:
            async for answer in serve_in_order(request_iterator, context, self._acknowledge, way):
                yield answer
        finally:
            self.num_open -= 1
            self.ended.set()

    async def _acknowledge(
        self, messages: AsyncIterator[PublishRequest], outbox: Outbox[PublishResponse]
    ) -> None:
        async for message in messages:
            await self.may_acknowledge.wait()
            sequence = message.events.sequence
            if sequence == BAD:
                raise ProtocolError("bad", "no batch")
            outbox.put(PublishResponse(ack=PublishAck(sequence=sequence)))

    async def WatchPrefixes(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        raise AssertionError("not asked here")
        yield

    async def MatchPrefix(self, request_iterator: Any, context: Any) -> AsyncIterator[Answer]:
        way: DirectWay[Answer] = DirectWay(self.direct, Question, iter)
        self.num_open += 1
        async for answer in serve_questions(
            request_iterator, context, self._answer, self._end, way
        ):
            self.num_over_grpc += 1
            yield answer

    async def _answer(self, question: Question, outbox: Outbox[Answer]) -> None:
        if question.correlation_id == SILENT:
            await asyncio.get_running_loop().create_future()
        if question.correlation_id == BAD:
            raise ProtocolError("bad", "no question")
        if question.correlation_id == BUG:
            raise ArithmeticError("a bug")
        outbox.put(Answer(correlation_id=question.correlation_id))

    def _end(self, _outbox: Outbox[Answer]) -> None:
        self.num_open -= 1
        self.num_ended += 1
        self.ended.set()


@asynccontextmanager
async def served(direct_port: int = 0) -> AsyncIterator[tuple[Echo, int]]:
    echo = Echo(DirectListener(wanted_port=direct_port))
    await echo.direct.start()
    server = make_server()
    port = bind_server(server, "127.0.0.1", 0)
    pb_grpc.add_KvManagerServiceServicer_to_server(echo, server)
    await server.start()
    yield echo, port
    async with asyncio.timeout(10):
        while echo.num_open:  # the server hears a moment later that a client left
            echo.ended.clear()
            await echo.ended.wait()
    await server.stop(0)
    await echo.direct.close()
    assert (echo.num_open, echo.direct.num_open, echo.direct.num_offers) == (0, 0, 0)


def _id_of(answer: Answer) -> int:
    if answer.correlation_id == UNREADABLE:
        raise ProtocolError("unreadable", "no answer")
    return answer.correlation_id


class Asker:
    """A client with its correlator."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.answers: Correlator[Question, Answer] = Correlator(_id_of)
        self.down = asyncio.Event()
        self._channel = open_channel(f"127.0.0.1:{port}")
        self.stream: PeerStream[Question, Answer] = PeerStream(
            "echo",
            pb_grpc.KvManagerServiceStub(self._channel).MatchPrefix,
            self.answers.receive_joined,
            on_down=self._went_down,
            joins=True,
            direct=DirectClient(host, Answer),
        )
        self.task = asyncio.create_task(self.stream.run())

    def _went_down(self, reason: str) -> None:
        self.answers.fail_all(reason)
        self.down.set()

    async def ask(self, number: int, padding: int = 0) -> int:
        question = Question(correlation_id=number, namespace="n" * padding)
        return (await self.answers.ask(self.stream, number, question, 10)).correlation_id

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._channel.close()


@asynccontextmanager
async def asking(port: int, host: str = "127.0.0.1") -> AsyncIterator[Asker]:
    asker = Asker(port, host)
    assert await asker.stream.wait_connected(10)
    try:
        yield asker
    finally:
        await asker.close()


async def test_messages_travel_on_the_socket_and_not_on_grpc() -> None:
    async with served() as (echo, port), asking(port) as asker:
        answers = await asyncio.gather(*(asker.ask(n, padding=n * 1000) for n in range(100, 200)))
        assert answers == list(range(100, 200))
        assert (echo.direct.num_open, echo.num_over_grpc) == (1, 0)


@pytest.mark.parametrize("direct_port", [-1, 0])
async def test_without_a_port_that_can_be_reached_messages_stay_on_grpc(direct_port: int) -> None:
    # An address of TEST-NET-1: nobody is there.
    async with served(direct_port) as (echo, port):
        echo.direct.local_name = ""
        async with asking(port, "192.0.2.1") as asker:
            answers = await asyncio.gather(*(asker.ask(n) for n in range(20, 30)))
            assert answers == list(range(20, 30))
            assert echo.direct.num_open == 0
            assert echo.num_over_grpc > 0


@pytest.mark.parametrize(("name", "host"), [(None, "192.0.2.1"), ("nobody", "127.0.0.1")])
async def test_who_is_on_the_same_host_needs_no_port(name: str | None, host: str) -> None:
    async with served() as (echo, port):
        echo.direct.local_name = name or echo.direct.local_name
        async with asking(port, host) as asker:
            assert await asyncio.gather(*(asker.ask(n) for n in range(9))) == list(range(9))
            assert (echo.direct.num_open, echo.num_over_grpc) == (1, 0)


async def test_a_client_that_leaves_ends_the_stream_and_what_ran_for_it() -> None:
    async with served() as (echo, port):
        async with asking(port) as asker:
            asked = asyncio.create_task(asker.ask(SILENT))
            await asker.ask(1)
        with pytest.raises(LostError):
            await asked
        await asyncio.wait_for(echo.ended.wait(), 10)


@pytest.mark.parametrize("number", [BAD, BUG])
async def test_an_error_breaks_the_stream_and_the_client_comes_back(number: int) -> None:
    async with served() as (echo, port), asking(port) as asker:
        with pytest.raises(LostError):
            await asker.ask(number)
        await asyncio.wait_for(asker.down.wait(), 10)
        assert await asker.stream.wait_connected(10)
        assert await asker.ask(2) == 2
        assert echo.num_ended == 1


@pytest.mark.parametrize("direct_port", [-1, 0])
async def test_an_answer_that_cannot_be_read_breaks_the_stream_and_no_more(
    direct_port: int,
) -> None:
    async with served(direct_port) as (_, port), asking(port) as asker:
        with pytest.raises(LostError):
            await asker.ask(UNREADABLE)
        assert await asker.stream.wait_connected(10)
        assert await asker.ask(2) == 2


async def test_a_socket_that_breaks_ends_the_stream_though_grpc_is_well() -> None:
    async with served() as (echo, port), asking(port) as asker:
        await asker.ask(1)
        asked = asyncio.create_task(asker.ask(SILENT))
        await asker.ask(2)
        await echo.direct.close()
        with pytest.raises(LostError):
            await asked
        await asyncio.wait_for(echo.ended.wait(), 10)


async def _raw(port: int) -> FramedConnection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: FramedConnection(lambda _: None, 100), "127.0.0.1", port
    )
    return connection


async def test_further_streams_stay_on_grpc_where_files_are_short() -> None:
    async with served() as (echo, port), asking(port) as first:
        await first.ask(1)
        echo.direct._most_open = 1
        async with asking(port) as second:
            assert (await first.ask(2), await second.ask(2)) == (2, 2)
        assert (echo.num_over_grpc, echo.direct.num_open) == (1, 1)


@pytest.mark.parametrize("greeting", [b"", b"x" * 16, b"x" * 17])
async def test_who_has_no_token_is_cut(greeting: bytes) -> None:
    async with served() as (echo, _):
        stranger = await _raw(echo.direct.port)
        stranger.greet(greeting)
        await asyncio.wait_for(stranger.closed, 10)
        assert echo.direct.num_open == 0


async def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_GREETING_S", 0.01)
    async with served() as (echo, _):
        stranger = await _raw(echo.direct.port)
        await asyncio.wait_for(stranger.closed, 10)
        assert echo.direct.num_open == 0


async def test_of_too_many_silent_ones_the_oldest_is_cut() -> None:
    async with served() as (echo, port), asking(port) as asker:
        await asker.ask(1)
        echo.direct._newcomers = Newcomers(FramedConnection.abort, limit=2)
        strangers = [await _raw(echo.direct.port) for _ in range(5)]
        for stranger in strangers[:3]:
            await asyncio.wait_for(stranger.closed, 10)
        assert echo.direct.num_open == 3  # two that are silent, and the stream's
        await asker.ask(2)
        for stranger in strangers[3:]:
            stranger.abort()
        await until(lambda: echo.direct.num_open == 1)


async def test_bytes_that_are_no_message_end_the_stream() -> None:
    async with served() as (echo, port), asking(port) as asker:
        asked = asyncio.create_task(asker.ask(SILENT))
        await asker.ask(1)
        (connection,) = echo.direct._open
        connection.data_received(b"\1\0\0\0\x07")
        with pytest.raises(LostError):
            await asked
        await asyncio.wait_for(echo.ended.wait(), 10)
        assert await asker.stream.wait_connected(10)


async def test_a_taken_port_is_an_error_of_the_config() -> None:
    first = DirectListener()
    await first.start()
    second = DirectListener(wanted_port=first.port)
    with pytest.raises(ConfigError, match="direct-port"):
        await second.start()
    await first.close()


async def test_messages_wait_while_the_peer_reads_too_slowly() -> None:
    outbox: Outbox[int] = Outbox()
    batches: list[list[int]] = []
    outbox.divert(batches.append)
    outbox.hold(True)
    outbox.put(1)
    outbox.put(2)
    await asyncio.sleep(0)
    assert batches == []
    outbox.hold(False)
    assert batches == [[1, 2]]
    outbox.put(3)
    outbox.close()
    assert batches == [[1, 2], [3]]


@asynccontextmanager
async def publishing(
    port: int, acks: list[int]
) -> AsyncIterator[PeerStream[PublishRequest, PublishResponse]]:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stream: PeerStream[PublishRequest, PublishResponse] = PeerStream(
            "echo",
            pb_grpc.KvManagerServiceStub(channel).Publish,
            lambda message: acks.append(message.ack.sequence),
            direct=DirectClient("127.0.0.1", PublishResponse),
        )
        task = asyncio.create_task(stream.run())
        assert await stream.wait_connected(10)
        try:
            yield stream
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _batch(sequence: int, num_bytes: int = 0) -> PublishRequest:
    return PublishRequest(events=BlockEvents(sequence=sequence, stored=bytes(num_bytes)))


@pytest.mark.parametrize("direct_port", [0, -1])
async def test_messages_are_handled_in_order_while_the_peer_is_held(direct_port: int) -> None:
    acks: list[int] = []
    async with served(direct_port) as (echo, port), publishing(port, acks) as stream:
        for sequence in range(100, 300):
            stream.send(_batch(sequence, 1 << 16))
        outbox = stream._outbox
        if direct_port == 0:
            await until(lambda: outbox is not None and outbox._held)
        assert acks == []
        echo.may_acknowledge.set()
        await until(lambda: len(acks) == 200)
        assert acks == list(range(100, 300))
        assert echo.direct.num_open == (direct_port == 0)


@pytest.mark.parametrize("direct_port", [0, -1])
async def test_a_bad_message_in_order_ends_the_stream(direct_port: int) -> None:
    acks: list[int] = []
    async with served(direct_port) as (echo, port), publishing(port, acks) as stream:
        echo.may_acknowledge.set()
        stream.send(_batch(1))
        await until(lambda: acks == [1])
        stream.send(_batch(BAD))
        await until(lambda: not stream.connected)
        await until(lambda: stream.connected)
        stream.send(_batch(2))
        await until(lambda: acks == [1, 2])
