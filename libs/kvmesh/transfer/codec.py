"""Bytes of a frame's head (header and body). Pure.

Header, 28 bytes, little endian. Its shape never changes, so any two versions can refuse each other:

    magic "KVMT" | version u8 | type u8 | flags u16 | body bytes u32 | payload bytes u64
    | crc32 of the body u32 | crc32 of the 24 bytes before u32

The body follows (`bodies.py`, `body_reader.py`), then for PUT, QUERY and DATA the payload and, with
FLAG_CHECKSUM, its checksum as u32. A trailer lets a sender sum each piece while it is still in the
cache. `decoder.py` splits a byte stream into frames.
Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from kvmesh.core.errors import ProtocolError
from kvmesh.transfer.bodies import KINDS, TYPES, encode_body
from kvmesh.transfer.body_reader import read_body
from kvmesh.transfer.frames import (
    FLAG_CHECKSUM,
    FLAG_LAST,
    FLAG_PART,
    FLAG_PROOF,
    MAGIC,
    MAX_BODY_BYTES,
    VERSION,
    DataFrame,
    Frame,
    FrameType,
    HelloFrame,
    PullFrame,
    PutFrame,
    QueryFrame,
)

HEADER = struct.Struct("<4sBBHIQII")
TRAILER = struct.Struct("<I")
"""Checksum of a payload."""

_CHECKED = struct.Struct("<4sBBHIQI")
_SUM = struct.Struct("<I")
# Tuples: `A | B` would build a union object at each call.
_WITH_CHECKSUM = (PutFrame, QueryFrame, DataFrame)
_WITH_PART = (PutFrame, PullFrame)


class Header(NamedTuple):
    """A checked header."""

    type: FrameType
    flags: int
    body_bytes: int
    payload_bytes: int
    body_crc: int


def encode_frame(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Encodes header and body of a frame; `payload_bytes` is for frames with a payload."""
    kind = TYPES[type(frame)]
    body = encode_body(frame)
    assert len(body) <= MAX_BODY_BYTES, "a frame's parts are bounded so that its body fits"
    assert (payload_bytes > 0) == KINDS[kind].has_payload, f"{kind!r}: {payload_bytes} bytes"
    flags = _flags(frame)
    checked = _CHECKED.pack(MAGIC, VERSION, kind, flags, len(body), payload_bytes, zlib.crc32(body))
    return checked + _SUM.pack(zlib.crc32(checked)) + body


def decode_header(data: bytes | memoryview) -> Header:
    """Checks the first 28 bytes before anything is allocated for the rest of the frame.

    Raises:
        ProtocolError: bad_magic, bad_header_checksum, bad_version, unknown_type, bad_flags,
            body_too_large or bad_payload_size.
    """
    fields = HEADER.unpack_from(data)
    magic, version, kind, flags, body_bytes, payload_bytes, body_crc, crc = fields
    if magic != MAGIC:
        raise ProtocolError("bad_magic", f"a frame begins with {MAGIC!r}, not {magic!r}")
    if zlib.crc32(data[: _CHECKED.size]) != crc:
        raise ProtocolError("bad_header_checksum", "the header's checksum does not match")
    if version != VERSION:
        raise ProtocolError("bad_version", f"version {version}, this side speaks {VERSION}")
    known = KINDS.get(kind)
    if known is None:
        raise ProtocolError("unknown_type", f"no frame has type {kind}")
    frame_type = known.type
    if flags & ~known.flags:
        raise ProtocolError("bad_flags", f"{frame_type.name} has no flags {flags:#x}")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError("body_too_large", f"{body_bytes} bytes, at most {MAX_BODY_BYTES}")
    if (payload_bytes > 0) != known.has_payload:
        raise ProtocolError("bad_payload_size", f"{frame_type.name} with {payload_bytes} bytes")
    return Header(frame_type, flags, body_bytes, payload_bytes, body_crc)


def decode_body(header: Header, body: bytes) -> Frame:
    """Decodes a frame from its header and body.

    Raises:
        ProtocolError: bad_body_checksum, or bad_body if it is cut, too long or invalid.
    """
    if zlib.crc32(body) != header.body_crc:
        raise ProtocolError("bad_body_checksum", "the body's checksum does not match")
    return read_body(header.type, header.flags, header.payload_bytes, body)


def _flags(frame: Frame) -> int:
    flags = 0
    if isinstance(frame, _WITH_CHECKSUM) and frame.checksum:
        flags |= FLAG_CHECKSUM
    if isinstance(frame, PutFrame) and frame.last:
        flags |= FLAG_LAST
    if isinstance(frame, _WITH_PART) and frame.part is not None:
        flags |= FLAG_PART
    if isinstance(frame, HelloFrame) and frame.proof:
        flags |= FLAG_PROOF
    return flags
