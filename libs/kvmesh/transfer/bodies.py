"""Bodies of frames: what stands between a header and a payload, by type. Pure.

HELLO and HELLO_OK may end with an offer and its terms, the offer with a segment; with FLAG_PART,
PUT and PULL end with the part of each block. `codec.py` puts headers before them.
Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.transfer.frames import (
    FLAG_CHECKSUM,
    FLAG_LAST,
    FLAG_PART,
    MAX_ARGUMENT_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_OPERAND_BYTES,
    MAX_RUNS,
    BlockPart,
    BlockRun,
    CancelFrame,
    Checksum,
    CommitFrame,
    CommitOkFrame,
    DataFrame,
    ErrorFrame,
    Frame,
    FrameType,
    GetFrame,
    HelloFrame,
    HelloOkFrame,
    LinkOffer,
    LinkTerms,
    PullFrame,
    PullRun,
    PutFrame,
    PutOkFrame,
    QueryFrame,
    SegmentOffer,
    WriteClaim,
)
from kvmesh.transfer.run_table import MANY_RUNS, RunT, RunTable

_U16, _U32, _U64 = (struct.Struct(f"<{code}") for code in "HIQ")
_TWO_U64 = struct.Struct("<QQ")
_COUNTS = struct.Struct("<III")
_ERROR = struct.Struct("<QBI")
_ID_AND_CLAIM = struct.Struct("<QQQIB")
_RUN = struct.Struct("<II")
_PULL_RUN = struct.Struct("<III")
_PART = struct.Struct("<II")
_LAYOUT = struct.Struct("<IIII")
_QUERY = struct.Struct("<QHIH")
_OFFER = struct.Struct("<QHBI")
_SEGMENT = struct.Struct("<QH")
_TERMS = struct.Struct("<BQ")


class Kind(NamedTuple):
    """What holds for frames of one type.

    Attributes:
        flags: that they may have.
    """

    type: FrameType
    flags: int = 0
    has_payload: bool = False


# By number and not by member: hashing a member is a call into Python, and so is making one.
KINDS: dict[int, Kind] = {int(kind): Kind(kind) for kind in FrameType} | {
    int(kind.type): kind
    for kind in (
        Kind(FrameType.PUT, FLAG_CHECKSUM | FLAG_LAST | FLAG_PART, has_payload=True),
        Kind(FrameType.PULL, FLAG_PART),
        Kind(FrameType.QUERY, FLAG_CHECKSUM, has_payload=True),
        Kind(FrameType.DATA, FLAG_CHECKSUM, has_payload=True),
    )
}


# --- out -------------------------------------------------------------------------------------


def encode_body(frame: Frame) -> bytes:
    """The body of a frame."""
    return _ENCODERS[type(frame)](frame)


def _encode_hello(frame: HelloFrame) -> bytes:
    me = _pack_text(frame.worker_id) + _U64.pack(frame.incarnation)
    peer = _pack_text(frame.peer_worker_id) + _U64.pack(frame.peer_incarnation)
    return me + peer + _pack_layout(frame.layout) + _pack_offer(frame.link)


def _encode_hello_ok(frame: HelloOkFrame) -> bytes:
    body = _pack_text(frame.worker_id) + _U64.pack(frame.incarnation)
    if frame.terms is not None:
        body += _TERMS.pack(frame.terms.checksum, frame.terms.window_bytes)
    return body


def _encode_put(frame: PutFrame) -> bytes:
    return _pack_head(frame) + _pack_runs(_RUN, frame.runs) + _pack_part(frame.part)


def _encode_pull(frame: PullFrame) -> bytes:
    return _pack_head(frame) + _pack_runs(_PULL_RUN, frame.runs) + _pack_part(frame.part)


def _encode_get(frame: GetFrame) -> bytes:
    return _pack_head(frame) + _pack_runs(_RUN, frame.runs)


def _encode_query(frame: QueryFrame) -> bytes:
    size = len(frame.arguments)
    assert size <= MAX_ARGUMENT_BYTES, f"{size} bytes of arguments"
    head = _QUERY.pack(frame.transfer_id, frame.op, frame.answer_bytes, size)
    return head + frame.arguments


def _encode_commit(frame: CommitFrame) -> bytes:
    counts = _COUNTS.pack(frame.first_token_id, frame.num_tokens, frame.num_blocks)
    return _pack_head(frame) + counts


def _encode_put_ok(frame: PutOkFrame) -> bytes:
    return _TWO_U64.pack(frame.transfer_id, frame.received_bytes)


def _encode_error(frame: ErrorFrame) -> bytes:
    retry_after_ms = min(frame.retry_after_ms, 2**32 - 1)
    message = frame.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    head = _ERROR.pack(frame.transfer_id, frame.work_done, retry_after_ms)
    return head + _pack_text(frame.reason) + _pack_text(message)


def _encode_id(frame: CommitOkFrame | CancelFrame | DataFrame) -> bytes:
    return _U64.pack(frame.transfer_id)


_ENCODERS: dict[type[Frame], Callable[[Any], bytes]] = {
    HelloFrame: _encode_hello,
    HelloOkFrame: _encode_hello_ok,
    PutFrame: _encode_put,
    PullFrame: _encode_pull,
    GetFrame: _encode_get,
    QueryFrame: _encode_query,
    CommitFrame: _encode_commit,
    PutOkFrame: _encode_put_ok,
    ErrorFrame: _encode_error,
    CommitOkFrame: _encode_id,
    CancelFrame: _encode_id,
    DataFrame: _encode_id,
}


def _pack_text(text: str) -> bytes:
    data = text.encode()
    return _U16.pack(len(data)) + data


def _pack_head(frame: PutFrame | PullFrame | GetFrame | CommitFrame) -> bytes:
    claim = frame.claim
    head = _ID_AND_CLAIM.pack(
        frame.transfer_id,
        claim.reservation_id,
        claim.incarnation,
        claim.generation,
        len(claim.capability),
    )
    return head + claim.capability


def _pack_runs(code: struct.Struct, runs: Sequence[tuple[int, ...]]) -> bytes:
    assert 1 <= len(runs) <= MAX_RUNS, f"a frame has 1 to {MAX_RUNS} runs, not {len(runs)}"
    if type(runs) is RunTable:
        assert int(runs.numbers.max()) < 2**32, "a number of a run does not fit"
        return _U16.pack(len(runs)) + runs.numbers.astype("<u4").tobytes()
    return _U16.pack(len(runs)) + b"".join([code.pack(*run) for run in runs])


def _pack_part(part: BlockPart | None) -> bytes:
    return b"" if part is None else _PART.pack(*part)


def _pack_offer(link: LinkOffer | None) -> bytes:
    if link is None:
        return b""
    offer = _OFFER.pack(link.link_id, link.lane, link.checksum, link.pool_blocks)
    return offer + _pack_segment(link.segment)


def _pack_segment(segment: SegmentOffer | None) -> bytes:
    if segment is None:
        return b""
    size = len(segment.metadata)
    assert size <= MAX_METADATA_BYTES, f"{size} bytes of metadata"
    head = _SEGMENT.pack(segment.address, size)
    return _pack_text(segment.engine) + head + segment.metadata


def _pack_layout(layout: KvLayout) -> bytes:
    sizes = (layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    return _pack_text(layout.model_fingerprint) + _pack_text(layout.dtype) + _LAYOUT.pack(*sizes)


# --- in --------------------------------------------------------------------------------------


def read_body(kind: FrameType, flags: int, payload_bytes: int, body: bytes) -> Frame:
    """The frame of a body whose checksum is right.

    Raises:
        ProtocolError: bad_body when it is cut, too long or makes no sense; bad_payload_size.
    """
    reader = _BodyReader(body)
    frame = _READERS[kind.value](reader, flags, payload_bytes)
    reader.expect_end()
    return frame


def _checksum(number: int) -> Checksum:
    if number not in Checksum.__members__.values():
        raise ProtocolError("bad_body", f"no checksum has number {number}")
    return Checksum(number)


class _BodyReader:
    """Reads a body's parts in order; never past its end."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise ProtocolError("bad_body", f"cut at byte {len(self._body)}")
        taken = self._body[self._at : end]
        self._at = end
        return taken

    def unpack(self, code: struct.Struct) -> tuple[Any, ...]:
        at, self._at = self._at, self._at + code.size
        if self._at > len(self._body):
            raise ProtocolError("bad_body", f"cut at byte {len(self._body)}")
        return code.unpack_from(self._body, at)

    def _number(self, code: struct.Struct) -> int:
        (value,) = self.unpack(code)
        return int(value)

    def u32(self) -> int:
        return self._number(_U32)

    def u64(self) -> int:
        return self._number(_U64)

    def text(self) -> str:
        try:
            return self.take(self._number(_U16)).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("bad_body", "text is not UTF-8") from error

    def head(self) -> tuple[int, WriteClaim]:
        """Transfer id and claim."""
        transfer_id, reservation_id, incarnation, generation, size = self.unpack(_ID_AND_CLAIM)
        claim = WriteClaim(reservation_id, incarnation, generation, self.take(size))
        return transfer_id, claim

    def part(self, flags: int) -> BlockPart | None:
        if not flags & FLAG_PART:
            return None
        part = BlockPart(*self.unpack(_PART))
        if part.size == 0:
            raise ProtocolError("bad_body", "a part of no bytes")
        return part

    def _num_runs(self) -> int:
        (num_runs,) = self.unpack(_U16)
        if not 1 <= num_runs <= MAX_RUNS:
            raise ProtocolError("bad_body", f"{num_runs} runs, must be 1 to {MAX_RUNS}")
        return int(num_runs)

    def runs(self) -> Sequence[BlockRun]:
        return self._runs(BlockRun._make, _RUN)

    def pull_runs(self) -> Sequence[PullRun]:
        return self._runs(PullRun._make, _PULL_RUN)

    def _runs(self, make: Callable[[Iterable[Any]], RunT], code: struct.Struct) -> Sequence[RunT]:
        num_runs = self._num_runs()
        packed = self.take(num_runs * code.size)
        if num_runs >= MANY_RUNS:
            numbers = np.frombuffer(packed, "<u4").reshape(num_runs, -1).astype(np.int64)
            is_empty = bool((numbers[:, -1] == 0).any())
            runs: Sequence[RunT] = RunTable(make, numbers)
        else:
            runs = tuple(map(make, code.iter_unpack(packed)))
            is_empty = 0 in [run[-1] for run in runs]
        if is_empty:
            raise ProtocolError("bad_body", "a run of no blocks")
        return runs

    def offer(self) -> LinkOffer | None:
        if self._at == len(self._body):
            return None
        link_id, lane, checksum, pool_blocks = self.unpack(_OFFER)
        segment = self._segment()
        if segment is not None and pool_blocks == 0:
            raise ProtocolError("bad_body", "a segment of no blocks")
        return LinkOffer(link_id, lane, _checksum(checksum), pool_blocks, segment)

    def _segment(self) -> SegmentOffer | None:
        if self._at == len(self._body):
            return None
        engine = self.text()
        address, size = self.unpack(_SEGMENT)
        if size > MAX_METADATA_BYTES:
            raise ProtocolError("bad_body", f"{size} bytes of metadata")
        return SegmentOffer(engine, address, self.take(size))

    def terms(self) -> LinkTerms | None:
        if self._at == len(self._body):
            return None
        checksum, window_bytes = self.unpack(_TERMS)
        return LinkTerms(_checksum(checksum), window_bytes)

    def layout(self) -> KvLayout:
        return KvLayout(self.text(), self.text(), self.u32(), self.u32(), self.u32(), self.u32())

    def expect_end(self) -> None:
        if self._at != len(self._body):
            raise ProtocolError("bad_body", f"{len(self._body) - self._at} bytes too many")


def _read_hello(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    me, peer = (WorkerId(body.text()), body.u64()), (WorkerId(body.text()), body.u64())
    return HelloFrame(*me, *peer, body.layout(), body.offer())


def _read_hello_ok(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return HelloOkFrame(WorkerId(body.text()), body.u64(), body.terms())


def _read_put(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    head, runs = body.head(), body.runs()
    last, checksum = bool(flags & FLAG_LAST), bool(flags & FLAG_CHECKSUM)
    return PutFrame(*head, runs, last, checksum, body.part(flags))


def _read_pull(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return PullFrame(*body.head(), body.pull_runs(), body.part(flags))


def _read_get(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return GetFrame(*body.head(), body.runs())


def _read_data(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return DataFrame(body.u64(), payload_bytes, bool(flags & FLAG_CHECKSUM))


def _read_query(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    transfer_id, op, answer_bytes, size = body.unpack(_QUERY)
    if size > MAX_ARGUMENT_BYTES:
        raise ProtocolError("bad_body", f"{size} bytes of arguments")
    if payload_bytes > MAX_OPERAND_BYTES:
        raise ProtocolError("bad_payload_size", f"{payload_bytes} bytes of operands")
    checksum = bool(flags & FLAG_CHECKSUM)
    arguments = body.take(size)
    return QueryFrame(transfer_id, op, answer_bytes, arguments, payload_bytes, checksum)


def _read_put_ok(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return PutOkFrame(*body.unpack(_TWO_U64))


def _read_commit(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return CommitFrame(*body.head(), *body.unpack(_COUNTS))


def _read_commit_ok(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return CommitOkFrame(body.u64())


def _read_cancel(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return CancelFrame(body.u64())


def _read_error(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    transfer_id, work_done, retry_after_ms = body.unpack(_ERROR)
    return ErrorFrame(transfer_id, body.text(), body.text(), work_done != 0, retry_after_ms)


_READERS: dict[int, Callable[[_BodyReader, int, int], Frame]] = {
    FrameType.HELLO.value: _read_hello,
    FrameType.HELLO_OK.value: _read_hello_ok,
    FrameType.PUT.value: _read_put,
    FrameType.PULL.value: _read_pull,
    FrameType.GET.value: _read_get,
    FrameType.DATA.value: _read_data,
    FrameType.QUERY.value: _read_query,
    FrameType.PUT_OK.value: _read_put_ok,
    FrameType.COMMIT.value: _read_commit,
    FrameType.COMMIT_OK.value: _read_commit_ok,
    FrameType.CANCEL.value: _read_cancel,
    FrameType.ERROR.value: _read_error,
}

TYPES: dict[type[Frame], int] = {
    HelloFrame: FrameType.HELLO.value,
    HelloOkFrame: FrameType.HELLO_OK.value,
    PutFrame: FrameType.PUT.value,
    PullFrame: FrameType.PULL.value,
    GetFrame: FrameType.GET.value,
    DataFrame: FrameType.DATA.value,
    QueryFrame: FrameType.QUERY.value,
    PutOkFrame: FrameType.PUT_OK.value,
    CommitFrame: FrameType.COMMIT.value,
    CommitOkFrame: FrameType.COMMIT_OK.value,
    CancelFrame: FrameType.CANCEL.value,
    ErrorFrame: FrameType.ERROR.value,
}
"""Numbers on the wire."""
