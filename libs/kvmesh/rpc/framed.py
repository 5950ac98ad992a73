"""Messages on a socket, each preceded by its length.

Tests: tests/unit/rpc/test_framed.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from google.protobuf.message import DecodeError, Message

from kvmesh.core.errors import ProtocolError

_HEAD_BYTES = 4


class FramedConnection(asyncio.Protocol):
    """Messages with their length before them, in both directions.

    Args:
        on_frame: called for each message's bytes; must not block. A ProtocolError or DecodeError
            from it is the peer's fault, and ends the connection with that error. Other errors are
            bugs: the loop reports them and ends the connection, as an error of a gRPC handler ends
            its stream. The state after such an error is unknown, so the end of the connection
            cancels everything that depends on it, on both sides.
        max_bytes: maximum length of a received frame.

    Attributes:
        closed: set to the reason when the connection has ended.
        failure: the error of an unreadable message from the peer.
        on_made: called when the connection is open, with TLS after the handshake.
        on_hold: called with True when the peer reads too slowly, with False when it has caught up.
    """

    def __init__(self, on_frame: Callable[[bytes], None], max_bytes: int) -> None:
        self.on_frame = on_frame
        self.max_bytes = max_bytes
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_hold: Callable[[bool], None] | None = None
        self.on_made: Callable[[], None] | None = None
        self.failure: ProtocolError | None = None
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transport is not a subclass, but has all methods used here.
        self._transport = cast("asyncio.Transport", transport)
        if self.on_made is not None:
            self.on_made()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            if self._partial:
                self._partial += data
                if not self._has_frame(self._partial):
                    return
                data = bytes(self._partial)
                self._partial.clear()
            at = self._take_frames(data)
        except ProtocolError as error:
            self._fail(error)
        except DecodeError as error:
            self._fail(ProtocolError("damaged_message", str(error)))
        else:
            if at < len(data):
                self._partial += data[at:]

    def send(self, messages: Iterable[Message]) -> None:
        """Sends or buffers messages. Does nothing after the end of the connection."""
        if self._transport is None:
            return
        pieces: list[bytes] = []
        for message in messages:
            body = message.SerializeToString()
            pieces.append(len(body).to_bytes(_HEAD_BYTES, "little"))
            pieces.append(body)
        self._transport.write(b"".join(pieces))

    def greet(self, token: bytes) -> None:
        """Sends a frame that is not a message."""
        assert self._transport is not None, "connected"
        self._transport.write(len(token).to_bytes(_HEAD_BYTES, "little") + token)

    def hold_reading(self, held: bool) -> None:
        """Stops reading from the peer, or continues."""
        if self._transport is None:
            return
        if held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """Ends the connection after the buffered data. May be called again."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection at once. May be called again."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        if not self.closed.done():
            self.closed.set_result("closed by peer" if error is None else str(error))

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self.on_hold is not None:
            self.on_hold(True)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self.on_hold is not None:
            self.on_hold(False)

    def _take_frames(self, data: bytes) -> int:
        at, size = 0, len(data)
        while size - at >= _HEAD_BYTES:
            start = at + _HEAD_BYTES
            end = start + self._length(data, at)
            if end > size:
                break
            at = end
            self.on_frame(data[start:end])
        return at

    def _has_frame(self, data: bytearray) -> bool:
        return len(data) >= _HEAD_BYTES and len(data) >= _HEAD_BYTES + self._length(data, 0)

    def _length(self, data: bytes | bytearray, at: int) -> int:
        length = int.from_bytes(data[at : at + _HEAD_BYTES], "little")
        if length > self.max_bytes:
            raise ProtocolError("damaged_message", f"a frame of {length} bytes")
        return length

    def _fail(self, error: ProtocolError) -> None:
        self.failure = error
        if not self.closed.done():
            self.closed.set_result(str(error))
        self.abort()


def ignore(_frame: bytes) -> None:
    """Ignores frames after the end of a stream."""
