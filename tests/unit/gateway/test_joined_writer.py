from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.gateway.joined_writer import JoinedWriter, Turn


@dataclass
class Sink:
    """A transport."""

    closing: bool = False
    sent: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.sent))


async def test_writes_of_one_turn_leave_together_each_to_its_own() -> None:
    turn, sinks = Turn(), [Sink(), Sink()]
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
    assert first.get_write_buffer_size() == len(b"a0a1a2c")


async def test_what_is_urgent_takes_along_what_is_held() -> None:
    turn, sink = Turn(), Sink()
    writer = JoinedWriter(sink, turn)
    writer.write(b"a")
    writer.write_now(b"b")
    assert sink.sent == [b"ab"]
    writer.write_now(b"c")
    await asyncio.sleep(0)
    assert sink.sent == [b"ab", b"c"]


async def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    turn, sink, other = Turn(), Sink(), Sink()
    writer = JoinedWriter(sink, turn)
    writer.write(b"a")
    JoinedWriter(other, turn).write(b"b")
    sink.closing = True
    await asyncio.sleep(0)
    assert writer.is_closing()
    assert (sink.sent, other.sent) == ([], [b"b"])
