"""Bodies of frames: the bytes between header and payload, by frame type. Pure.

HELLO and HELLO_OK may end with an offer and its terms, the offer with a segment. With FLAG_PROOF
HELLO begins with a proof; with FLAG_PART PUT and PULL end with the part of each block. `codec.py`
prepends the headers.
Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvmesh.core.kv_formats import OWN_ENGINE, OWN_ORDER
from kvmesh.core.mesh_secret import PROOF_BYTES
from kvmesh.core.types import KvLayout
from kvmesh.transfer.body_shapes import (
    COUNTS,
    ERROR,
    ID_AND_CLAIM,
    LAYOUT,
    OFFER,
    PART,
    PULL_RUN,
    QUERY,
    RUN,
    SEGMENT,
    TERMS,
    TWO_U64,
    U16,
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
    MAX_RUNS,
    BlockPart,
    CancelFrame,
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
    PullFrame,
    PutFrame,
    PutOkFrame,
    QueryFrame,
    SegmentOffer,
)
from kvmesh.transfer.run_table import RunTable


class Kind(NamedTuple):
    """Properties of one frame type.

    Attributes:
        flags: flags that its frames may have.
    """

    type: FrameType
    flags: int = 0
    has_payload: bool = False


# Keyed by number, since hashing or creating an enum member is a call into Python.
KINDS: dict[int, Kind] = {int(kind): Kind(kind) for kind in FrameType} | {
    int(kind.type): kind
    for kind in (
        Kind(FrameType.HELLO, FLAG_PROOF),
        Kind(FrameType.PUT, FLAG_CHECKSUM | FLAG_LAST | FLAG_PART, has_payload=True),
        Kind(FrameType.PULL, FLAG_PART),
        Kind(FrameType.QUERY, FLAG_CHECKSUM, has_payload=True),
        Kind(FrameType.DATA, FLAG_CHECKSUM, has_payload=True),
    )
}


def encode_body(frame: Frame) -> bytes:
    """Encodes the body of a frame."""
    return _ENCODERS[type(frame)](frame)


def _encode_hello(frame: HelloFrame) -> bytes:
    me = _pack_text(frame.worker_id) + U64.pack(frame.incarnation)
    peer = _pack_text(frame.peer_worker_id) + U64.pack(frame.peer_incarnation)
    assert len(frame.proof) in (0, PROOF_BYTES), f"{len(frame.proof)} bytes of proof"
    return frame.proof + me + peer + _pack_layout(frame.layout) + _pack_offer(frame.link)


def _encode_hello_ok(frame: HelloOkFrame) -> bytes:
    body = _pack_text(frame.worker_id) + U64.pack(frame.incarnation)
    if frame.terms is not None:
        body += TERMS.pack(frame.terms.checksum, frame.terms.window_bytes)
    return body


def _encode_put(frame: PutFrame) -> bytes:
    return _pack_head(frame) + _pack_runs(RUN, frame.runs) + _pack_part(frame.part)


def _encode_pull(frame: PullFrame) -> bytes:
    return _pack_head(frame) + _pack_runs(PULL_RUN, frame.runs) + _pack_part(frame.part)


def _encode_get(frame: GetFrame) -> bytes:
    return _pack_head(frame) + _pack_runs(RUN, frame.runs)


def _encode_query(frame: QueryFrame) -> bytes:
    size = len(frame.arguments)
    assert size <= MAX_ARGUMENT_BYTES, f"{size} bytes of arguments"
    head = QUERY.pack(frame.transfer_id, frame.op, frame.answer_bytes, size)
    return head + frame.arguments


def _encode_commit(frame: CommitFrame) -> bytes:
    counts = COUNTS.pack(frame.first_token_id, frame.num_tokens, frame.num_blocks)
    return _pack_head(frame) + counts


def _encode_put_ok(frame: PutOkFrame) -> bytes:
    return TWO_U64.pack(frame.transfer_id, frame.received_bytes)


def _encode_error(frame: ErrorFrame) -> bytes:
    retry_after_ms = min(frame.retry_after_ms, 2**32 - 1)
    message = frame.message.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    head = ERROR.pack(frame.transfer_id, frame.work_done, retry_after_ms)
    return head + _pack_text(frame.reason) + _pack_text(message)


def _encode_id(frame: CommitOkFrame | CancelFrame | DataFrame) -> bytes:
    return U64.pack(frame.transfer_id)


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
    return U16.pack(len(data)) + data


def _pack_head(frame: PutFrame | PullFrame | GetFrame | CommitFrame) -> bytes:
    claim = frame.claim
    head = ID_AND_CLAIM.pack(
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
        return U16.pack(len(runs)) + runs.numbers.astype("<u4").tobytes()
    return U16.pack(len(runs)) + b"".join([code.pack(*run) for run in runs])


def _pack_part(part: BlockPart | None) -> bytes:
    return b"" if part is None else PART.pack(*part)


def _pack_offer(link: LinkOffer | None) -> bytes:
    if link is None:
        return b""
    offer = OFFER.pack(link.link_id, link.lane, link.checksum, link.pool_blocks)
    return offer + _pack_segment(link.segment)


def _pack_segment(segment: SegmentOffer | None) -> bytes:
    if segment is None:
        return b""
    size = len(segment.metadata)
    assert size <= MAX_METADATA_BYTES, f"{size} bytes of metadata"
    head = SEGMENT.pack(segment.address, size)
    return _pack_text(segment.engine) + head + segment.metadata


def _pack_layout(layout: KvLayout) -> bytes:
    sizes = (layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
    # The usual form is only the dtype, as in HELLOs from before there were other forms.
    kept = layout.engine, layout.order, layout.tp_rank, layout.tp_size
    is_usual = kept == (OWN_ENGINE, OWN_ORDER, 0, 1)
    form = layout.dtype if is_usual else " ".join(map(str, (layout.dtype, *kept)))
    return _pack_text(layout.model_fingerprint) + _pack_text(form) + LAYOUT.pack(*sizes)


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
"""Numbers of the frame types on the wire."""
