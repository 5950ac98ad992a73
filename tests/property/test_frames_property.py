"""Any frames, split anywhere, come out whole; any bytes at all never do harm."""

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.alignment import Run, align_runs
from kvmesh.transfer.codec import TRAILER, encode_frame
from kvmesh.transfer.decoder import (
    FrameDecoder,
    FrameEvent,
    PayloadBytes,
    PayloadEnd,
    PayloadStart,
)
from kvmesh.transfer.frames import (
    BlockPart,
    BlockRun,
    CancelFrame,
    Checksum,
    CommitFrame,
    CommitOkFrame,
    ErrorFrame,
    Frame,
    GetFrame,
    HelloFrame,
    HelloOkFrame,
    LinkOffer,
    LinkTerms,
    PullFrame,
    PullRun,
    PutFrame,
    PutOkFrame,
    SegmentOffer,
)

BLOCK_BYTES = 3

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=20)
worker_ids = text.map(WorkerId)
claims = st.builds(WriteClaim, u64, u64, u32, st.binary(max_size=255))
words = text.map(lambda each: each.replace(" ", ""))  # a dtype is one word
layouts = st.builds(KvLayout, text, words, u32, u32, u32, u32)
runs = st.lists(st.builds(BlockRun, u32, st.integers(1, 5)), min_size=1, max_size=6).map(tuple)
checksums = st.sampled_from(Checksum)
segments = st.builds(SegmentOffer, text, u64, st.binary(max_size=300))
lanes = st.integers(0, 2**16 - 1)
offers = st.builds(LinkOffer, u64, lanes, checksums, u32) | st.builds(
    LinkOffer, u64, lanes, checksums, st.integers(1, 2**32 - 1), segments
)
terms = st.builds(LinkTerms, checksums, u64)
proofs = st.just(b"") | st.binary(min_size=32, max_size=32)
parts = st.builds(BlockPart, u32, st.integers(1, 2**32 - 1))
pull_runs = st.builds(PullRun, u32, u32, st.integers(1, 2**32 - 1))
plain_frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(HelloFrame, worker_ids, u64, worker_ids, u64, layouts, st.none() | offers, proofs),
    st.builds(HelloOkFrame, worker_ids, u64, st.none() | terms),
    st.builds(
        PullFrame,
        u64,
        claims,
        st.lists(pull_runs, min_size=1, max_size=6).map(tuple),
        st.none() | parts,
    ),
    st.builds(GetFrame, u64, claims, runs),
    st.builds(PutOkFrame, u64, u64),
    st.builds(CommitFrame, u64, claims, u32, u32, u32),
    st.builds(CommitOkFrame, u64),
    st.builds(CancelFrame, u64),
    st.builds(ErrorFrame, u64, text, text, st.booleans(), u32),
)
put_parts = st.tuples(st.integers(0, BLOCK_BYTES - 1), st.integers(1, BLOCK_BYTES)).map(
    lambda pair: BlockPart(pair[0], min(pair[1], BLOCK_BYTES - pair[0]))
)
puts = st.builds(PutFrame, u64, claims, runs, st.booleans(), st.booleans(), st.none() | put_parts)
streams = st.lists(st.one_of(plain_frames, puts), max_size=6)


def _payload(put: PutFrame) -> bytes:
    each = BLOCK_BYTES if put.part is None else put.part.size
    return bytes(i % 256 for i in range(put.num_blocks * each))


def _crc32(data: bytes) -> int:
    """The definition, bit by bit: not the library that the code uses."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _wire(frames: Sequence[Frame]) -> bytes:
    wire = b""
    for frame in frames:
        if isinstance(frame, PutFrame):
            payload = _payload(frame)
            wire += encode_frame(frame, len(payload)) + payload
            wire += TRAILER.pack(_crc32(payload)) if frame.checksum else b""
        else:
            wire += encode_frame(frame)
    return wire


def _pieces(data: st.DataObject, wire: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    borders = [0, *cuts, len(wire)]
    return [wire[a:b] for a, b in itertools.pairwise(borders)]


def _decode(pieces: Sequence[bytes]) -> tuple[list[Any], str | None]:
    """Events with each payload's bytes joined, and the reason of the error that ended them."""
    events: list[FrameEvent | bytes] = []
    decoder = FrameDecoder(BLOCK_BYTES)
    try:
        for piece in pieces:
            for event in decoder.feed(piece):
                last = events[-1] if events else None
                if not isinstance(event, PayloadBytes):
                    events.append(event)
                elif isinstance(last, bytes):
                    events[-1] = last + bytes(event.data)
                else:
                    events.append(bytes(event.data))
    except ProtocolError as error:
        return events, error.reason
    return events, None


@given(streams, st.data())
def test_frames_survive_any_split(frames: list[Frame], data: st.DataObject) -> None:
    expected: list[Any] = []
    for frame in frames:
        if isinstance(frame, PutFrame):
            payload = _payload(frame)
            expected += [PayloadStart(frame, len(payload)), payload, PayloadEnd(frame, intact=True)]
        else:
            expected.append(frame)

    assert _decode(_pieces(data, _wire(frames))) == (expected, None)


@given(streams.filter(bool), st.data())
def test_damage_is_an_error_or_a_wrong_checksum_in_the_same_place(
    frames: list[Frame], data: st.DataObject
) -> None:
    wire = bytearray(_wire(frames))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= data.draw(st.integers(1, 255))
    good_events, _ = _decode([_wire(frames)])

    events, reason = _decode([bytes(wire)])

    assert _decode(_pieces(data, bytes(wire))) == (events, reason)
    intact = [e for e in events if isinstance(e, PayloadEnd) and e.intact]
    unchecked = any(isinstance(f, PutFrame) and not f.checksum for f in frames)
    assert reason or len(intact) < sum(isinstance(e, PayloadEnd) for e in good_events) or unchecked


@given(st.binary(max_size=300), streams, st.data())
def test_garbage_after_frames_is_named(
    garbage: bytes, frames: list[Frame], data: st.DataObject
) -> None:
    events, reason = _decode(_pieces(data, _wire(frames) + garbage))

    assert _decode([_wire(frames)])[0] == events
    assert reason == ("bad_magic" if len(garbage) >= 28 else None)


def _fewest(source: Sequence[int], target: Sequence[int]) -> int:
    """Tries every way to cut the lists."""
    best = len(source)
    for cuts in range(2 ** max(0, len(source) - 1)):
        joined = [i for i in range(1, len(source)) if not cuts >> (i - 1) & 1]
        if all(source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1 for i in joined):
            best = min(best, len(source) - len(joined))
    return best


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_alignment_is_exact_and_needs_the_fewest_runs(pairs: list[tuple[int, int]]) -> None:
    source, target = [a for a, _ in pairs], [b for _, b in pairs]

    found = align_runs(source, target)

    moved = [
        (run.source_start + i, run.target_start + i) for run in found for i in range(run.count)
    ]
    assert moved == pairs
    assert len(found) == _fewest(source, target)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 50))
def test_contiguous_lists_move_in_one_run(source: int, target: int, count: int) -> None:
    lists = range(source, source + count), range(target, target + count)

    assert align_runs(*lists) == [Run(source, target, count)]
