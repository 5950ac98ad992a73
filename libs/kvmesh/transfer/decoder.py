"""Splits a byte stream, fed in any pieces, into frames. Pure; never buffers payload bytes.

A payload is announced by `PayloadStart`. Its reader may receive the bytes straight into their
destination and feed that same memory: the decoder only counts and checksums it.
Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.core.errors import ProtocolError
from kvmesh.transfer.codec import HEADER, TRAILER, Header, decode_body, decode_header
from kvmesh.transfer.frames import DataFrame, Frame, PutFrame, QueryFrame

FrameWithPayload = PutFrame | QueryFrame | DataFrame
Sum = Callable[[memoryview, int], int]
"""Running checksum: (bytes, sum so far) to sum."""


@dataclass(frozen=True, slots=True)
class PayloadStart:
    """A PUT, QUERY or DATA was read; `num_bytes` of payload follow."""

    frame: FrameWithPayload
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PayloadBytes:
    """A piece of the payload: a slice of the fed bytes, not a copy."""

    data: memoryview


@dataclass(frozen=True, slots=True)
class PayloadEnd:
    """The payload is complete; `intact` is False if its checksum does not match."""

    frame: FrameWithPayload
    intact: bool


FrameEvent = Frame | PayloadStart | PayloadBytes | PayloadEnd
"""Frames without payload are events themselves; a PUT, QUERY or DATA comes as PayloadStart."""


class _Stage(enum.Enum):
    HEADER = enum.auto()
    BODY = enum.auto()
    PAYLOAD = enum.auto()
    TRAILER = enum.auto()


class FrameDecoder:
    """Turns bytes into events. After an error it stays unusable: the frame boundary is lost.

    Attributes:
        wanted: bytes until the present part (header, body, payload or trailer) is complete. A
            reader that never feeds more keeps the bytes of the next part in the socket.
        sum: checksum function of payloads; may be set between two frames.
    """

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes` is the size of one KV block; a PUT must carry whole blocks of it."""
        self.sum: Sum = zlib.crc32
        self._block_bytes = block_bytes
        self._stage = _Stage.HEADER
        self._part = bytearray()
        self._header: Header | None = None
        self._frame: FrameWithPayload | None = None
        self._crc = 0
        self._broken: ProtocolError | None = None
        self.wanted = HEADER.size

    @property
    def at_boundary(self) -> bool:
        """Whether the stream may end here: the last frame is complete, the next not begun."""
        return self._stage is _Stage.HEADER and not self._part

    @property
    def in_payload(self) -> bool:
        """Whether the next bytes are payload."""
        return self._stage is _Stage.PAYLOAD

    def feed(self, data: memoryview | bytes | bytearray) -> Iterator[FrameEvent]:
        """Yields the events of these bytes, in order. Uniterated bytes do not count as fed.

        Raises:
            ProtocolError: the bytes are no valid frame; the reason is one of `decode_header`'s,
                `decode_body`'s or bad_payload_size.
        """
        if self._broken is not None:
            raise self._broken
        view = memoryview(data)
        try:
            while view:
                if self._stage is _Stage.HEADER and not self._part and len(view) >= HEADER.size:
                    end, frame = self._whole_frame(view)
                    if frame is not None:
                        view = view[end:]
                        yield frame
                        continue
                piece, view = view[: self.wanted], view[self.wanted :]
                self.wanted -= len(piece)
                if self._stage is _Stage.PAYLOAD:
                    yield from self._payload(piece)
                    continue
                if self._part or self.wanted:
                    self._part += piece
                if self.wanted == 0:
                    part, self._part = self._part or piece, bytearray()
                    yield from self._part_complete(bytes(part))
        except ProtocolError as error:
            self._broken = error
            raise

    @property
    def has_sum(self) -> bool:
        """Whether a checksum follows the payload that is being read."""
        assert self._frame is not None, "no payload has begun"
        return self._frame.checksum

    def take_whole_payload(self, value: int) -> PayloadEnd | None:
        """Counts a payload whose reader computed its sum; like `take_payload` of all of it.

        Args:
            value: the computed checksum; ignored without `has_sum`.
        """
        self._crc = value
        return self._payload_taken(self.wanted)

    @staticmethod
    def _whole_frame(view: memoryview) -> tuple[int, Frame | None]:
        """Returns the end of the frame that begins here, and the frame.

        The frame is None if it has a payload or is incomplete. Small frames usually arrive whole:
        this takes half the time of decoding part by part.
        """
        header = decode_header(view)
        end = HEADER.size + header.body_bytes
        if header.payload_bytes or header.body_bytes == 0 or len(view) < end:
            return end, None
        return end, decode_body(header, bytes(view[HEADER.size : end]))

    def take_payload(self, views: Sequence[memoryview], num_bytes: int) -> PayloadEnd | None:
        """Counts the first `num_bytes` of `views` as payload, without events for them.

        For a reader that received them in place. Returns the end of a payload without checksum.
        """
        assert self._stage is _Stage.PAYLOAD, "not in a payload"
        assert num_bytes <= self.wanted, "more than the payload has left"
        frame = self._frame
        assert frame is not None
        if frame.checksum:
            left = num_bytes
            for view in views:
                self._crc = self.sum(view[:left], self._crc)
                left -= min(view.nbytes, left)
                if left == 0:
                    break
        return self._payload_taken(num_bytes)

    def _payload_taken(self, num_bytes: int) -> PayloadEnd | None:
        assert self._stage is _Stage.PAYLOAD, "not in a payload"
        frame = self._frame
        assert frame is not None
        self.wanted -= num_bytes
        if self.wanted == 0:
            self._expect(_Stage.TRAILER if frame.checksum else _Stage.HEADER)
            return None if frame.checksum else PayloadEnd(frame, intact=True)
        return None

    def _payload(self, piece: memoryview) -> Iterator[FrameEvent]:
        self.wanted += len(piece)
        end = self.take_payload([piece], len(piece))
        yield PayloadBytes(piece)
        if end is not None:
            yield end

    def _part_complete(self, part: bytes) -> Iterator[FrameEvent]:
        if self._stage is _Stage.HEADER:
            self._header = decode_header(part)
            self._expect(_Stage.BODY, self._header.body_bytes)
            if self.wanted == 0:  # every frame has a body; decode_body raises for the missing one
                decode_body(self._header, b"")
        elif self._stage is _Stage.BODY:
            yield self._body_complete(part)
        else:
            assert self._frame is not None
            self._expect(_Stage.HEADER)
            (crc,) = TRAILER.unpack(part)
            yield PayloadEnd(self._frame, intact=crc == self._crc)

    def _body_complete(self, body: bytes) -> FrameEvent:
        assert self._header is not None
        frame = decode_body(self._header, body)
        if not isinstance(frame, PutFrame | QueryFrame | DataFrame):
            self._expect(_Stage.HEADER)
            return frame
        num_bytes = self._header.payload_bytes
        if isinstance(frame, PutFrame):
            self._check_size(frame, num_bytes)
        self._frame, self._crc = frame, 0
        self._expect(_Stage.PAYLOAD, num_bytes)
        return PayloadStart(frame, num_bytes)

    def _check_size(self, put: PutFrame, num_bytes: int) -> None:
        each = self._block_bytes
        if put.part is not None:
            if put.part.offset + put.part.size > each:
                raise ProtocolError("bad_payload_size", f"{put.part} of blocks of {each}")
            each = put.part.size
        if num_bytes != put.num_blocks * each:
            message = f"{num_bytes} bytes for {put.num_blocks} blocks of {each}"
            raise ProtocolError("bad_payload_size", message)

    def _expect(self, stage: _Stage, num_bytes: int = 0) -> None:
        self._stage = stage
        if stage is _Stage.HEADER:
            num_bytes = HEADER.size
        elif stage is _Stage.TRAILER:
            num_bytes = TRAILER.size
        self.wanted = num_bytes
