"""Reads the bodies of frames that `bodies.py` encodes; never past their ends. Pure.

Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvmesh.core.errors import ProtocolError
from kvmesh.core.mesh_secret import PROOF_BYTES
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.body_shapes import (
    COUNTS,
    ERROR,
    ID_AND_CLAIM,
    OFFER,
    PART,
    PULL_RUN,
    QUERY,
    RUN,
    SEGMENT,
    TERMS,
    TWO_U64,
    U16,
    U32,
    U64,
)
from kvmesh.transfer.frames import (
    FLAG_CHECKSUM,
    FLAG_LAST,
    FLAG_PART,
    FLAG_PROOF,
    MAX_ARGUMENT_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MAX_NAME_BYTES,
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
)
from kvmesh.transfer.run_table import MANY_RUNS, RunT, RunTable


def read_body(kind: FrameType, flags: int, payload_bytes: int, body: bytes) -> Frame:
    """Reads the frame of a body whose checksum is right.

    Raises:
        ProtocolError: bad_body if it is cut, too long or invalid; bad_payload_size.
    """
    reader = _BodyReader(body)
    frame = _READERS[kind.value](reader, flags, payload_bytes)
    reader.expect_end()
    return frame


def _checksum(number: int) -> Checksum:
    if number not in Checksum.__members__.values():
        raise ProtocolError("bad_body", f"no checksum has number {number}")
    return Checksum(number)


_NUM_KEPT = 4
"""Number of words after the dtype in the text of an unusual layout."""
_NUMBER = re.compile("[0-9]{1,6}", re.ASCII)


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
        return self._number(U32)

    def u64(self) -> int:
        return self._number(U64)

    def text(self, most: int = MAX_NAME_BYTES) -> str:
        size = self._number(U16)
        if size > most:
            raise ProtocolError("bad_body", f"{size} bytes of text, at most {most}")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("bad_body", "text is not UTF-8") from error

    def head(self) -> tuple[int, WriteClaim]:
        """Reads a transfer id and a claim."""
        transfer_id, reservation_id, incarnation, generation, size = self.unpack(ID_AND_CLAIM)
        claim = WriteClaim(reservation_id, incarnation, generation, self.take(size))
        return transfer_id, claim

    def part(self, flags: int) -> BlockPart | None:
        if not flags & FLAG_PART:
            return None
        part = BlockPart(*self.unpack(PART))
        if part.size == 0:
            raise ProtocolError("bad_body", "a part of no bytes")
        return part

    def _num_runs(self) -> int:
        (num_runs,) = self.unpack(U16)
        if not 1 <= num_runs <= MAX_RUNS:
            raise ProtocolError("bad_body", f"{num_runs} runs, must be 1 to {MAX_RUNS}")
        return int(num_runs)

    def runs(self) -> Sequence[BlockRun]:
        return self._runs(BlockRun._make, RUN)

    def pull_runs(self) -> Sequence[PullRun]:
        return self._runs(PullRun._make, PULL_RUN)

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
        link_id, lane, checksum, pool_blocks = self.unpack(OFFER)
        segment = self._segment()
        if segment is not None and pool_blocks == 0:
            raise ProtocolError("bad_body", "a segment of no blocks")
        return LinkOffer(link_id, lane, _checksum(checksum), pool_blocks, segment)

    def _segment(self) -> SegmentOffer | None:
        if self._at == len(self._body):
            return None
        engine = self.text()
        address, size = self.unpack(SEGMENT)
        if size > MAX_METADATA_BYTES:
            raise ProtocolError("bad_body", f"{size} bytes of metadata")
        return SegmentOffer(engine, address, self.take(size))

    def terms(self) -> LinkTerms | None:
        if self._at == len(self._body):
            return None
        checksum, window_bytes = self.unpack(TERMS)
        return LinkTerms(_checksum(checksum), window_bytes)

    def layout(self) -> KvLayout:
        fingerprint, (dtype, *kept) = self.text(), self.text().split(" ")
        sizes = self.u32(), self.u32(), self.u32(), self.u32()
        if not kept:
            return KvLayout(fingerprint, dtype, *sizes)
        if len(kept) != _NUM_KEPT or not all(_NUMBER.fullmatch(each) for each in kept[2:]):
            raise ProtocolError("bad_body", "a layout has a dtype, or dtype engine order rank size")
        engine, order, rank, size = kept
        return KvLayout(fingerprint, dtype, *sizes, engine, order, int(rank), int(size))

    def expect_end(self) -> None:
        if self._at != len(self._body):
            raise ProtocolError("bad_body", f"{len(self._body) - self._at} bytes too many")


def _read_hello(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    proof = body.take(PROOF_BYTES) if flags & FLAG_PROOF else b""
    me, peer = (WorkerId(body.text()), body.u64()), (WorkerId(body.text()), body.u64())
    return HelloFrame(*me, *peer, body.layout(), body.offer(), proof)


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
    transfer_id, op, answer_bytes, size = body.unpack(QUERY)
    if size > MAX_ARGUMENT_BYTES:
        raise ProtocolError("bad_body", f"{size} bytes of arguments")
    if payload_bytes > MAX_OPERAND_BYTES:
        raise ProtocolError("bad_payload_size", f"{payload_bytes} bytes of operands")
    checksum = bool(flags & FLAG_CHECKSUM)
    arguments = body.take(size)
    return QueryFrame(transfer_id, op, answer_bytes, arguments, payload_bytes, checksum)


def _read_put_ok(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return PutOkFrame(*body.unpack(TWO_U64))


def _read_commit(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return CommitFrame(*body.head(), *body.unpack(COUNTS))


def _read_commit_ok(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return CommitOkFrame(body.u64())


def _read_cancel(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    return CancelFrame(body.u64())


def _read_error(body: _BodyReader, flags: int, payload_bytes: int) -> Frame:
    transfer_id, work_done, retry_after_ms = body.unpack(ERROR)
    reason, message = body.text(), body.text(MAX_MESSAGE_BYTES)
    return ErrorFrame(transfer_id, reason, message, work_done != 0, retry_after_ms)


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
