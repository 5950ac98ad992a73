"""Peers of a data channel that are never silent and never done: a byte now and then is not enough.

Either side gives them up, so that neither blocks, memory nor the engine's thread wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvmesh.core.errors import LostError
from kvmesh.transfer import query_line, server_channel
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.frames import BlockRun, GetFrame, HelloFrame
from tests.contract import test_queries as queries
from tests.contract import test_reads as reads
from tests.contract.test_channels import certificate, options_of
from tests.faulty_link import Faults, faulty_link
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    LAYOUT,
    PREFILL,
    STALL_S,
    reservation_behind,
    tcp_pair,
    until,
    whole,
)

__all__ = ["certificate"]

IN_TIME_S = 20
"""What drips would take minutes."""


@pytest.fixture(params=["tcp", "tcp_tls"])
async def asking(request: pytest.FixtureRequest) -> AsyncIterator[queries.Asking]:
    """An asker that is soon tired of waiting."""
    send, receive = options_of(request.param, request)
    async for each in queries.running(replace(send, stall_timeout_s=STALL_S), receive):
        yield each


@pytest.mark.parametrize("passes_at_once", [10, 60, 500, 6000])
async def test_a_holder_whose_answer_drips_is_given_up(
    asking: queries.Asking, passes_at_once: int
) -> None:
    """In the greeting of TLS or ours, in the head of an answer, in the middle of it."""
    async with asyncio.timeout(IN_TIME_S):
        async with faulty_link(
            asking.holder.data_endpoint, Faults(answers_drip_at=passes_at_once)
        ) as endpoint:
            asking.asker._options = replace(asking.asker._options, connect_timeout_s=1)
            holder = replace(asking.holder, data_endpoint=endpoint)
            with pytest.raises(LostError, match=r"too slow|silent|timed out"):
                await asyncio.to_thread(asking.attend, 8, 1, holder)
            assert not asking.asker.answers(holder.peer), "it is left alone for a while"
            asking.asker.close()


@pytest.fixture
async def over_tcp(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[queries.Asking]:
    """An asker and a holder that are soon tired of what goes on and on, but not of silence."""
    monkeypatch.setattr(server_channel, "PATIENCE_S", 1.0)
    send = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=5)
    async for each in queries.running(send, ReceiveOptions(stall_timeout_s=STALL_S)):
        yield each


async def test_a_holder_that_takes_a_question_slowly_is_given_up(
    over_tcp: queries.Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_line, "PATIENCE", 0.2)
    monkeypatch.setattr(server_channel, "PATIENCE_S", 60.0)
    async with asyncio.timeout(IN_TIME_S):
        async with faulty_link(over_tcp.holder.data_endpoint, Faults(bytes_per_s=4e6)) as endpoint:
            holder = replace(over_tcp.holder, data_endpoint=endpoint)
            with pytest.raises(LostError, match="too slow"):
                await asyncio.to_thread(over_tcp.attend, 32_000, 1, holder)
            over_tcp.asker.close()


async def test_a_question_that_drips_in_does_not_keep_its_place(over_tcp: queries.Asking) -> None:
    async with asyncio.timeout(IN_TIME_S):
        async with faulty_link(over_tcp.holder.data_endpoint, Faults(drip_at=400)) as endpoint:
            holder = replace(over_tcp.holder, data_endpoint=endpoint)
            asked = asyncio.create_task(asyncio.to_thread(over_tcp.attend, 8, 1, holder))
            await until(lambda: bool(over_tcp.echo.begun))
            await until(lambda: over_tcp.echo.ended == over_tcp.echo.begun)
            await asyncio.to_thread(over_tcp.asker.close)
            with pytest.raises(LostError):
                await asked


async def test_blocks_are_not_held_for_a_writer_that_fills_them_in_drips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_channel, "PATIENCE_S", 1.0)
    async with tcp_pair() as pair, asyncio.timeout(IN_TIME_S):
        async with faulty_link(pair.reservation.data_endpoint, Faults(drip_at=400)) as endpoint:
            writing = asyncio.create_task(pair.pool.put(reservation_behind(endpoint), whole(4)))
            await until(lambda: bool(pair.target.granted))
            await until(lambda: bool(pair.target.ended))
            writing.cancel()
            with pytest.raises((asyncio.CancelledError, LostError)):
                await writing
        assert not any(ok for _, ok in pair.target.ended)


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[reads.Reading]:
    """A holder whose patience is half of the time in which it notices silence."""
    monkeypatch.setattr(server_channel, "PATIENCE_S", 1.0)
    async for each in reads.running(
        SendOptions(kinds=("tcp",), lanes=2), ReceiveOptions(stall_timeout_s=2)
    ):
        yield each


async def test_blocks_are_not_held_for_a_reader_that_takes_them_slowly(
    reading: reads.Reading, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvmesh.transfer.data_server")
    endpoint = reading.lease.data_endpoint
    async with asyncio.timeout(IN_TIME_S):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=4096)
        writer.write(encode_frame(HelloFrame(PREFILL, 3, DECODE, 7, LAYOUT)))
        runs = (BlockRun(0, 300),)
        writer.write(encode_frame(GetFrame(1, reading.lease.claim, runs)))
        taken = 0
        while not reading.held.ended:
            taken += len(await reader.read(16 << 10))
            await asyncio.sleep(0.01)
        writer.close()
    assert 0 < taken < 300 * BLOCK
    (ended,) = [each for each in caplog.records if each.getMessage() == "data_channel_ended"]
    assert "too slow" in vars(ended)["fields"]["cause"]
