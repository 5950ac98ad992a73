from __future__ import annotations

import asyncio

from services.gateway.fronts.joined_writer import JoinedWriter, Turn
from tests.unit.gateway.fake_transport import FakeTransport


async def test_writes_of_one_turn_leave_together_each_to_its_own() -> None:
    turn, sinks = Turn(), [FakeTransport(), FakeTransport()]
    first, second = (JoinedWriter(sink, turn) for sink in sinks)
    for number in range(3):
        first.write(b"a%d" % number)
    second.write(b"b")
    assert [sink.sent for sink in sinks] == [[], []]
    await asyncio.sleep(0)
    assert [sink.sent for sink in sinks] == [[b"a0a1a2"], [b"b"]]
    first.write(b"c")
    await asyncio.sleep(0)
    assert sinks[0].sent[1:] == [b"c"]
    sinks[0].unsent = 7
    assert first.get_write_buffer_size() == 7


async def test_what_is_urgent_takes_along_what_is_held() -> None:
    turn, sink = Turn(), FakeTransport()
    writer = JoinedWriter(sink, turn)
    writer.write(b"a")
    writer.write_now(b"b")
    assert sink.sent == [b"ab"]
    writer.write_now(b"c")
    await asyncio.sleep(0)
    assert sink.sent == [b"ab", b"c"]


async def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    turn, sink, other = Turn(), FakeTransport(), FakeTransport()
    writer = JoinedWriter(sink, turn)
    writer.write(b"a")
    JoinedWriter(other, turn).write(b"b")
    sink.closing = True
    await asyncio.sleep(0)
    assert writer.is_closing()
    assert (sink.sent, other.sent) == ([], [b"b"])
