"""Bytes of a frame's head (header and body). Pure.

Header, 28 bytes, little endian; its shape never changes, so that any two versions can say no:

    magic "KVMT" | version u8 | type u8 | flags u16 | body bytes u32 | payload bytes u64
    | crc32 of the body u32 | crc32 of the 24 bytes before u32

The body follows, then for PUT and QUERY the payload and, with FLAG_CHECKSUM, its checksum as u32. A
trailer lets a sender sum each piece while it is hot in the cache. HELLO and HELLO_OK may end with
an offer and its terms. `decoder.py` cuts a byte stream into frames.
Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.transfer.frames import (
    FLAG_CHECKSUM,
    FLAG_LAST,
    MAGIC,
    MAX_ARGUMENT_BYTES,
    MAX_BODY_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_OPERAND_BYTES,
    MAX_RUNS,
    VERSION,
    BlockRun,
    CancelFrame,
    Checksum,
    CommitFrame,
    CommitOkFrame,
    ErrorFrame,
    Frame,
    FrameType,
    HelloFrame,
    HelloOkFrame,
    LinkOffer,
    LinkTerms,
    PullFrame,
    PullRun,
    PutFrame,
    PutOkFrame,
    QueryFrame,
    ReservedFrame,
    WriteClaim,
)

HEADER = struct.Struct("<4sBBHIQII")
TRAILER = struct.Struct("<I")
"""Checksum of a payload."""

_CHECKED = struct.Struct("<4sBBHIQI")
_U8, _U16, _U32, _U64 = (struct.Struct(f"<{code}") for code in "BHIQ")
_TWO_U64 = struct.Struct("<QQ")
_COUNTS = struct.Struct("<III")
_ERROR = struct.Struct("<QBI")
_CLAIM = struct.Struct("<QQI")
_RUN = struct.Struct("<II")
_PULL_RUN = struct.Struct("<III")
_LAYOUT = struct.Struct("<IIII")
_QUERY = struct.Struct("<QHIH")
_OFFER = struct.Struct("<QHBI")
_TERMS = struct.Struct("<BQ")

WITH_PAYLOAD = frozenset({FrameType.PUT, FrameType.QUERY})
_FLAGS = {FrameType.PUT: FLAG_CHECKSUM | FLAG_LAST, FrameType.QUERY: FLAG_CHECKSUM}

_TYPES: dict[type[Frame], FrameType] = {
    HelloFrame: FrameType.HELLO,
    HelloOkFrame: FrameType.HELLO_OK,
    PutFrame: FrameType.PUT,
    PullFrame: FrameType.PULL,
    QueryFrame: FrameType.QUERY,
    PutOkFrame: FrameType.PUT_OK,
    CommitFrame: FrameType.COMMIT,
    CommitOkFrame: FrameType.COMMIT_OK,
    CancelFrame: FrameType.CANCEL,
    ErrorFrame: FrameType.ERROR,
}


class Header(NamedTuple):
    """A checked header."""

    type: FrameType
    flags: int
    body_bytes: int
    payload_bytes: int
    body_crc: int


def encode_frame(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Header and body of a frame; `payload_bytes` is for PUT and QUERY."""
    kind = frame.type if isinstance(frame, ReservedFrame) else _TYPES[type(frame)]
    flags, body = _encode_flags(frame), _encode_body(frame)
    assert len(body) <= MAX_BODY_BYTES, "a frame's parts are bounded so that its body fits"
    assert (payload_bytes > 0) == (kind in WITH_PAYLOAD), f"{kind.name}: {payload_bytes} bytes"
    checked = _CHECKED.pack(MAGIC, VERSION, kind, flags, len(body), payload_bytes, zlib.crc32(body))
    return checked + _U32.pack(zlib.crc32(checked)) + body


def decode_header(data: bytes | bytearray) -> Header:
    """Checks 28 bytes before anything is allocated for the rest of the frame.

    Raises:
        ProtocolError: bad_magic, bad_header_checksum, bad_version, unknown_type, bad_flags,
            body_too_large or bad_payload_size.
    """
    magic, version, kind, flags, body_bytes, payload_bytes, body_crc, crc = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("bad_magic", f"a frame begins with {MAGIC!r}, not {magic!r}")
    if zlib.crc32(data[: _CHECKED.size]) != crc:
        raise ProtocolError("bad_header_checksum", "the header's checksum does not match")
    if version != VERSION:
        raise ProtocolError("bad_version", f"version {version}, this side speaks {VERSION}")
    if kind not in FrameType.__members__.values():
        raise ProtocolError("unknown_type", f"no frame has type {kind}")
    frame_type = FrameType(kind)
    if flags & ~_FLAGS.get(frame_type, 0):
        raise ProtocolError("bad_flags", f"{frame_type.name} has no flags {flags:#x}")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError("body_too_large", f"{body_bytes} bytes, at most {MAX_BODY_BYTES}")
    if (payload_bytes > 0) != (frame_type in WITH_PAYLOAD):
        raise ProtocolError("bad_payload_size", f"{frame_type.name} with {payload_bytes} bytes")
    return Header(frame_type, flags, body_bytes, payload_bytes, body_crc)


def decode_body(header: Header, body: bytes | bytearray) -> Frame:
    """The frame of a header and its body.

    Raises:
        ProtocolError: bad_body_checksum, or bad_body when it is cut, too long or makes no sense.
    """
    if zlib.crc32(body) != header.body_crc:
        raise ProtocolError("bad_body_checksum", "the body's checksum does not match")
    reader = _BodyReader(body)
    frame = _decode_body(header, reader)
    reader.expect_end(open_ended=isinstance(frame, ReservedFrame))
    return frame


def _encode_flags(frame: Frame) -> int:
    if not isinstance(frame, PutFrame | QueryFrame):
        return 0
    last = FLAG_LAST if isinstance(frame, PutFrame) and frame.last else 0
    return (FLAG_CHECKSUM if frame.checksum else 0) | last


def _encode_body(frame: Frame) -> bytes:
    match frame:
        case HelloFrame():
            me = _pack_text(frame.worker_id) + _U64.pack(frame.incarnation)
            peer = _pack_text(frame.peer_worker_id) + _U64.pack(frame.peer_incarnation)
            body = me + peer + _pack_layout(frame.layout) + _pack_offer(frame.link)
        case HelloOkFrame():
            body = _pack_text(frame.worker_id) + _U64.pack(frame.incarnation)
            if frame.terms is not None:
                body += _TERMS.pack(frame.terms.checksum, frame.terms.window_bytes)
        case PutFrame():
            head = _U64.pack(frame.transfer_id) + _pack_claim(frame.claim)
            body = head + _pack_runs(frame.runs)
        case PullFrame():
            head = _U64.pack(frame.transfer_id) + _pack_claim(frame.claim)
            runs = [_PULL_RUN.pack(*run) for run in frame.runs]
            assert 1 <= len(runs) <= MAX_RUNS, f"a PULL has 1 to {MAX_RUNS} runs, not {len(runs)}"
            body = head + _U16.pack(len(runs)) + b"".join(runs)
        case QueryFrame():
            size = len(frame.arguments)
            assert size <= MAX_ARGUMENT_BYTES, f"{size} bytes of arguments"
            head = _QUERY.pack(frame.transfer_id, frame.op, frame.answer_bytes, size)
            body = head + frame.arguments
        case CommitFrame():
            head = _U64.pack(frame.transfer_id) + _pack_claim(frame.claim)
            body = head + _COUNTS.pack(frame.first_token_id, frame.num_tokens, frame.num_blocks)
        case PutOkFrame():
            body = _TWO_U64.pack(frame.transfer_id, frame.received_bytes)
        case ErrorFrame():
            retry_after_ms = min(frame.retry_after_ms, 2**32 - 1)
            message = frame.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
            head = _ERROR.pack(frame.transfer_id, frame.work_done, retry_after_ms)
            body = head + _pack_text(frame.reason) + _pack_text(message)
        case CommitOkFrame() | CancelFrame() | ReservedFrame():
            body = _U64.pack(frame.transfer_id)
    return body


def _decode_body(header: Header, body: _BodyReader) -> Frame:
    frame: Frame
    match header.type:
        case FrameType.HELLO:
            me, peer = (WorkerId(body.text()), body.u64()), (WorkerId(body.text()), body.u64())
            frame = HelloFrame(*me, *peer, body.layout(), body.offer())
        case FrameType.HELLO_OK:
            frame = HelloOkFrame(WorkerId(body.text()), body.u64(), body.terms())
        case FrameType.PUT:
            frame = PutFrame(
                transfer_id=body.u64(),
                claim=body.claim(),
                runs=body.runs(),
                last=bool(header.flags & FLAG_LAST),
                checksum=bool(header.flags & FLAG_CHECKSUM),
            )
        case FrameType.PULL:
            frame = PullFrame(body.u64(), body.claim(), body.pull_runs())
        case FrameType.QUERY:
            frame = body.query(header)
        case FrameType.PUT_OK:
            frame = PutOkFrame(body.u64(), body.u64())
        case FrameType.COMMIT:
            frame = CommitFrame(body.u64(), body.claim(), body.u32(), body.u32(), body.u32())
        case FrameType.COMMIT_OK:
            frame = CommitOkFrame(body.u64())
        case FrameType.CANCEL:
            frame = CancelFrame(body.u64())
        case FrameType.ERROR:
            transfer_id, work_done, retry_after_ms = body.u64(), body.u8() != 0, body.u32()
            frame = ErrorFrame(transfer_id, body.text(), body.text(), work_done, retry_after_ms)
        case FrameType.GET:
            frame = ReservedFrame(header.type, body.u64())
    return frame


def _pack_text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def _pack_claim(claim: WriteClaim) -> bytes:
    head = _CLAIM.pack(claim.reservation_id, claim.incarnation, claim.generation)
    return head + _U8.pack(len(claim.capability)) + claim.capability


def _pack_runs(runs: Sequence[BlockRun]) -> bytes:
    assert 1 <= len(runs) <= MAX_RUNS, f"a PUT has 1 to {MAX_RUNS} runs, not {len(runs)}"
    return _U16.pack(len(runs)) + b"".join(_RUN.pack(*run) for run in runs)


def _pack_offer(link: LinkOffer | None) -> bytes:
    if link is None:
        return b""
    return _OFFER.pack(link.link_id, link.lane, link.checksum, link.pool_blocks)


def _pack_layout(layout: KvLayout) -> bytes:
    sizes = (layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    return _pack_text(layout.model_fingerprint) + _pack_text(layout.dtype) + _LAYOUT.pack(*sizes)


def _checksum(number: int) -> Checksum:
    if number not in Checksum.__members__.values():
        raise ProtocolError("bad_body", f"no checksum has number {number}")
    return Checksum(number)


class _BodyReader:
    """Reads a body's parts in order; never past its end."""

    def __init__(self, body: bytes | bytearray) -> None:
        self._body = bytes(body)
        self._at = 0

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise ProtocolError("bad_body", f"cut at byte {len(self._body)}")
        taken = self._body[self._at : end]
        self._at = end
        return taken

    def _number(self, code: struct.Struct) -> int:
        (value,) = code.unpack(self._take(code.size))
        return int(value)

    def u8(self) -> int:
        return self._number(_U8)

    def u32(self) -> int:
        return self._number(_U32)

    def u64(self) -> int:
        return self._number(_U64)

    def text(self) -> str:
        try:
            return self._take(self._number(_U16)).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("bad_body", "text is not UTF-8") from error

    def claim(self) -> WriteClaim:
        reservation_id, incarnation, generation = _CLAIM.unpack(self._take(_CLAIM.size))
        return WriteClaim(reservation_id, incarnation, generation, self._take(self.u8()))

    def _num_runs(self) -> int:
        num_runs = self._number(_U16)
        if not 1 <= num_runs <= MAX_RUNS:
            raise ProtocolError("bad_body", f"{num_runs} runs, must be 1 to {MAX_RUNS}")
        return num_runs

    def runs(self) -> tuple[BlockRun, ...]:
        packed = self._take(self._num_runs() * _RUN.size)
        runs = tuple(map(BlockRun._make, _RUN.iter_unpack(packed)))
        if any(run.count == 0 for run in runs):
            raise ProtocolError("bad_body", "a run of no blocks")
        return runs

    def pull_runs(self) -> tuple[PullRun, ...]:
        packed = self._take(self._num_runs() * _PULL_RUN.size)
        runs = tuple(map(PullRun._make, _PULL_RUN.iter_unpack(packed)))
        if any(run.count == 0 for run in runs):
            raise ProtocolError("bad_body", "a run of no blocks")
        return runs

    def query(self, header: Header) -> QueryFrame:
        transfer_id, op, answer_bytes, size = _QUERY.unpack(self._take(_QUERY.size))
        if size > MAX_ARGUMENT_BYTES:
            raise ProtocolError("bad_body", f"{size} bytes of arguments")
        if header.payload_bytes > MAX_OPERAND_BYTES:
            raise ProtocolError("bad_payload_size", f"{header.payload_bytes} bytes of operands")
        checksum = bool(header.flags & FLAG_CHECKSUM)
        arguments = self._take(size)
        return QueryFrame(transfer_id, op, answer_bytes, arguments, header.payload_bytes, checksum)

    def offer(self) -> LinkOffer | None:
        if self._at == len(self._body):
            return None
        link_id, lane, checksum, pool_blocks = _OFFER.unpack(self._take(_OFFER.size))
        return LinkOffer(link_id, lane, _checksum(checksum), pool_blocks)

    def terms(self) -> LinkTerms | None:
        if self._at == len(self._body):
            return None
        checksum, window_bytes = _TERMS.unpack(self._take(_TERMS.size))
        return LinkTerms(_checksum(checksum), window_bytes)

    def layout(self) -> KvLayout:
        return KvLayout(self.text(), self.text(), self.u32(), self.u32(), self.u32(), self.u32())

    def expect_end(self, *, open_ended: bool) -> None:
        if not open_ended and self._at != len(self._body):
            raise ProtocolError("bad_body", f"{len(self._body) - self._at} bytes too many")
