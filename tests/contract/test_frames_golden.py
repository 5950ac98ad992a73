"""Bytes on the wire, pinned: a change here breaks workers that are not upgraded together."""

import dataclasses
import struct
import zlib
from dataclasses import replace

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.codec import HEADER, TRAILER, encode_frame
from kvmesh.transfer.decoder import (
    FrameDecoder,
    FrameEvent,
    PayloadBytes,
    PayloadEnd,
    PayloadStart,
)
from kvmesh.transfer.frames import (
    MAX_BODY_BYTES,
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

BLOCK_BYTES = 8
LAYOUT = KvLayout("model-1", "bfloat16", 16, 2, 3, 8)
CLAIM = WriteClaim(0x1122334455667788, 7, 2, b"secret")
PUT = PutFrame(5, CLAIM, (BlockRun(0, 1), BlockRun(4, 2)), last=False, checksum=True)
PAYLOAD = bytes(range(100, 124))
OFFER = LinkOffer(0x0102030405060708, 1, Checksum.CRC32C, pool_blocks=512)
WITH_PAYLOAD = (PutFrame, QueryFrame, DataFrame)

GOLDEN: list[tuple[Frame, str]] = [
    (
        HelloFrame(WorkerId("p0"), 3, WorkerId("d0"), 7, LAYOUT),
        (
            "4b564d54010100003b000000000000000000000020c77f54cbeb319a0200703003000000000000000200643007"
            "0000000000000007006d6f64656c2d31080062666c6f6174313610000000020000000300000008000000"
        ),
    ),
    (
        HelloOkFrame(WorkerId("d0"), 7),
        "4b564d54010200000c00000000000000000000003135166b63ba3a69020064300700000000000000",
    ),
    (
        PUT,
        (
            "4b564d540103010035000000180000000000000058552a6c10c3939405000000000000008877665544332211"
            "07000000000000000200000006736563726574020000000000010000000400000002000000"
        ),
    ),
    (
        PutOkFrame(5, 24),
        "4b564d5401040000100000000000000000000000ddbcbc3912e6231605000000000000001800000000000000",
    ),
    (
        CommitFrame(6, CLAIM, 42, 20, 3),
        (
            "4b564d54010500002f0000000000000000000000332e1e4cde455aca06000000000000008877665544332211"
            "07000000000000000200000006736563726574"
            "2a0000001400000003000000"
        ),
    ),
    (
        CommitOkFrame(6),
        "4b564d5401060000080000000000000000000000eed64da32df2004d0600000000000000",
    ),
    (
        CancelFrame(5),
        "4b564d54010700000800000000000000000000000dd1c22d85a07ced0500000000000000",
    ),
    (
        ErrorFrame(5, "stale", "gone", work_done=True, retry_after_ms=250),
        (
            "4b564d54010800001a000000000000000000000045d1f149159d702f"
            "050000000000000001fa00000005007374616c650400676f6e65"
        ),
    ),
    (
        GetFrame(8, CLAIM, (BlockRun(0, 1), BlockRun(4, 2))),
        (
            "4b564d5401090000350000000000000000000000d6acc67253fd97b3080000000000000088776655"
            "44332211070000000000000002000000067365637265740200000000000100000004000000020000"
            "00"
        ),
    ),
    (DataFrame(8, 24), "4b564d54010c0100080000001800000000000000dcc4c7b6a417623c0800000000000000"),
    (
        replace(PUT, part=BlockPart(2, 6), runs=(BlockRun(0, 1), BlockRun(4, 3))),
        (
            "4b564d54010305003d0000001800000000000000d8591294d30292ac050000000000000088776655"
            "44332211070000000000000002000000067365637265740200000000000100000004000000030000"
            "000200000006000000"
        ),
    ),
    (
        PullFrame(5, CLAIM, (PullRun(9, 0, 1),), BlockPart(0, 4)),
        (
            "4b564d54010b04003900000000000000000000004ec3ad54ab8dd204050000000000000088776655"
            "44332211070000000000000002000000067365637265740100090000000000000001000000000000"
            "0004000000"
        ),
    ),
    (
        HelloFrame(WorkerId("p0"), 3, WorkerId("d0"), 7, LAYOUT, OFFER),
        (
            "4b564d54010100004a0000000000000000000000c1e56baec7b1f3cd020070300300000000000000"
            "02006430070000000000000007006d6f64656c2d31080062666c6f61743136100000000200000003"
            "00000008000000080706050403020101000200020000"
        ),
    ),
    (
        HelloOkFrame(WorkerId("d0"), 7, LinkTerms(Checksum.CRC32C, 1 << 26)),
        (
            "4b564d54010200001500000000000000000000000d4525aff3c608d4020064300700000000000000"
            "020000000400000000"
        ),
    ),
    (
        PullFrame(5, CLAIM, (PullRun(9, 0, 1), PullRun(20, 4, 2))),
        (
            "4b564d54010b00003d0000000000000000000000b27c89e98f28c19d050000000000000088776655"
            "44332211070000000000000002000000067365637265740200090000000000000001000000140000"
            "000400000002000000"
        ),
    ),
    (
        QueryFrame(9, 3, 4096, b"arguments", 24),
        (
            "4b564d54010a0100190000001800000000000000db77f53396e89cc3090000000000000003000010"
            "00000900617267756d656e7473"
        ),
    ),
]
IDS = [type(frame).__name__ + str(i) for i, (frame, _) in enumerate(GOLDEN)]


def _wire(frame: Frame, head: str) -> bytes:
    trailer = TRAILER.pack(zlib.crc32(PAYLOAD))
    return bytes.fromhex(head) + (PAYLOAD + trailer if isinstance(frame, WITH_PAYLOAD) else b"")


def _feed(decoder: FrameDecoder, *pieces: bytes) -> list[FrameEvent]:
    return [event for piece in pieces for event in decoder.feed(piece)]


def _joined(events: list[FrameEvent]) -> tuple[list[FrameEvent], bytes]:
    payload = b"".join(e.data for e in events if isinstance(e, PayloadBytes))
    return [e for e in events if not isinstance(e, PayloadBytes)], payload


def _expected(frame: Frame) -> tuple[list[FrameEvent], bytes]:
    if isinstance(frame, WITH_PAYLOAD):
        return [PayloadStart(frame, len(PAYLOAD)), PayloadEnd(frame, intact=True)], PAYLOAD
    return [frame], b""


def _reason(data: bytes) -> str:
    decoder = FrameDecoder(BLOCK_BYTES)
    with pytest.raises(ProtocolError) as caught:
        _feed(decoder, data)
    with pytest.raises(ProtocolError) as again:
        _feed(decoder, b"x")
    assert again.value is caught.value
    return caught.value.reason


def _head(  # every field can be made wrong, the checksums then fit again
    *,
    magic: bytes = b"KVMT",
    version: int = 1,
    kind: int = FrameType.COMMIT_OK,
    flags: int = 0,
    body: bytes = struct.pack("<Q", 6),
    body_bytes: int | None = None,
    payload_bytes: int = 0,
) -> bytes:
    length = len(body) if body_bytes is None else body_bytes
    checked = struct.pack(
        "<4sBBHIQI", magic, version, kind, flags, length, payload_bytes, zlib.crc32(body)
    )
    return checked + struct.pack("<I", zlib.crc32(checked)) + body


@pytest.mark.parametrize(("frame", "head"), GOLDEN, ids=IDS)
def test_frames_encode_to_the_pinned_bytes(frame: Frame, head: str) -> None:
    payload_bytes = len(PAYLOAD) if isinstance(frame, WITH_PAYLOAD) else 0

    assert encode_frame(frame, payload_bytes).hex() == head


@pytest.mark.parametrize(("frame", "head"), GOLDEN, ids=IDS)
def test_pinned_bytes_decode_however_they_are_split(frame: Frame, head: str) -> None:
    wire = _wire(frame, head)
    for cut in range(len(wire) + 1):
        decoder = FrameDecoder(BLOCK_BYTES)
        assert _joined(_feed(decoder, wire[:cut], wire[cut:])) == _expected(frame)
        assert decoder.at_boundary


@pytest.mark.parametrize(("frame", "head"), GOLDEN, ids=IDS)
def test_a_cut_frame_gives_no_frame(frame: Frame, head: str) -> None:
    wire = _wire(frame, head)
    for end in range(1, len(wire)):
        decoder = FrameDecoder(BLOCK_BYTES)
        events = _feed(decoder, wire[:end])
        assert not decoder.at_boundary
        assert not any(isinstance(event, PayloadEnd) or event == frame for event in events)


@pytest.mark.parametrize(("frame", "head"), GOLDEN, ids=IDS)
def test_any_flipped_bit_of_a_head_is_noticed(frame: Frame, head: str) -> None:
    good = bytes.fromhex(head)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert _reason(bytes(bad)) in {"bad_magic", "bad_header_checksum", "bad_body_checksum"}


def test_a_put_head_written_by_hand() -> None:
    body = struct.pack("<Q", 5) + struct.pack("<QQIB6s", 0x1122334455667788, 7, 2, 6, b"secret")
    body += struct.pack("<H4I", 2, 0, 1, 4, 2)

    head = _head(kind=FrameType.PUT, flags=1, body=body, payload_bytes=24)

    assert encode_frame(PUT, 24) == head


def test_the_newer_heads_written_by_hand() -> None:
    claim = struct.pack("<QQIB6s", 0x1122334455667788, 7, 2, 6, b"secret")
    pull = struct.pack("<Q", 5) + claim + struct.pack("<H6I", 2, 9, 0, 1, 20, 4, 2)
    query = struct.pack("<QHIH9s", 9, 3, 4096, 9, b"arguments")
    terms = struct.pack("<H2sQ", 2, b"d0", 7) + struct.pack("<BQ", 2, 1 << 26)
    heads = {type(frame): head for frame, head in GOLDEN}

    assert heads[PullFrame] == _head(kind=FrameType.PULL, body=pull).hex()
    assert (
        heads[QueryFrame]
        == _head(kind=FrameType.QUERY, flags=1, body=query, payload_bytes=24).hex()
    )
    assert heads[HelloOkFrame] == _head(kind=FrameType.HELLO_OK, body=terms).hex()
    assert heads[HelloFrame].endswith(struct.pack("<QHBI", 0x0102030405060708, 1, 2, 512).hex())


def _hello_with(pool_blocks: int, engine: bytes, size: int, metadata: bytes) -> bytes:
    body = struct.pack("<H2sQH2sQ", 2, b"p0", 3, 2, b"d0", 7)
    body += struct.pack("<H7sH8s4I", 7, b"model-1", 8, b"bfloat16", 16, 2, 3, 8)
    body += struct.pack("<QHBI", 0x0102030405060708, 1, 2, pool_blocks)
    body += struct.pack(f"<H{len(engine)}sQH", len(engine), engine, 0x7F00, size) + metadata
    return _head(kind=FrameType.HELLO, body=body)


def test_a_hello_with_a_segment_written_by_hand() -> None:
    segment = SegmentOffer("nixl", 0x7F00, b"keys")
    link = dataclasses.replace(OFFER, segment=segment)
    hello = HelloFrame(WorkerId("p0"), 3, WorkerId("d0"), 7, LAYOUT, link)
    head = _hello_with(512, b"nixl", 4, b"keys")

    assert encode_frame(hello) == head
    assert _feed(FrameDecoder(BLOCK_BYTES), head) == [hello]


@pytest.mark.parametrize(
    "head",
    [
        _hello_with(0, b"nixl", 4, b"keys"),
        _hello_with(512, b"nixl", 5, b"keys"),
        _hello_with(512, b"nixl", 3, b"keys"),
        _hello_with(512, b"nixl", 32769, bytes(32769)),
        _hello_with(512, b"\xff", 4, b"keys"),
    ],
    ids=["no blocks", "cut", "too long", "too large", "no text"],
)
def test_a_segment_that_makes_no_sense_is_a_bad_body(head: bytes) -> None:
    assert _reason(head) == "bad_body"


PROOF = bytes(range(32))


def test_a_hello_with_a_proof_is_the_plain_one_behind_it() -> None:
    plain, proved = encode_frame(HELLO), encode_frame(replace(HELLO, proof=PROOF))
    body = PROOF + plain[28:]

    assert proved == _head(kind=FrameType.HELLO, flags=8, body=body)
    assert _feed(FrameDecoder(BLOCK_BYTES), proved) == [replace(HELLO, proof=PROOF)]


def test_a_proof_that_is_cut_is_a_bad_body_and_no_other_frame_has_one() -> None:
    assert _reason(_head(kind=FrameType.HELLO, flags=8, body=PROOF[:31])) == "bad_body"
    assert _reason(_head(kind=FrameType.HELLO_OK, flags=8, body=PROOF)) == "bad_flags"


def test_a_flipped_payload_bit_is_told_at_its_end() -> None:
    wire = bytearray(_wire(*GOLDEN[2]))
    wire[-10] ^= 4

    assert _feed(FrameDecoder(BLOCK_BYTES), bytes(wire))[-1] == PayloadEnd(PUT, intact=False)


def test_a_payload_without_checksum_has_no_trailer() -> None:
    put = PutFrame(5, CLAIM, (BlockRun(0, 3),), checksum=False)
    decoder = FrameDecoder(BLOCK_BYTES)

    events = _feed(decoder, encode_frame(put, 24) + PAYLOAD)

    assert _joined(events) == ([PayloadStart(put, 24), PayloadEnd(put, intact=True)], PAYLOAD)
    assert decoder.wanted == HEADER.size


def test_payload_bytes_are_slices_of_what_was_fed() -> None:
    wire = bytearray(_wire(*GOLDEN[2]))
    (piece,) = [e for e in FrameDecoder(8).feed(wire) if isinstance(e, PayloadBytes)]

    wire[-28] = 0

    assert piece.data[0] == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_head(magic=b"HTTP"), "bad_magic"),
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "bad_magic"),
        (_head(version=2), "bad_version"),
        (_head(kind=0), "unknown_type"),
        (_head(kind=200), "unknown_type"),
        (_head(flags=1), "bad_flags"),
        (_head(kind=FrameType.PUT, flags=8, payload_bytes=8), "bad_flags"),
        (_head(body_bytes=MAX_BODY_BYTES + 1), "body_too_large"),
        (_head(body_bytes=2**32 - 1), "body_too_large"),
        (_head(payload_bytes=8), "bad_payload_size"),
        (_head(kind=FrameType.PUT), "bad_payload_size"),
        (_head(body=b""), "bad_body"),
        (_head(body=b"1234567"), "bad_body"),
        (_head(body=b"123456789"), "bad_body"),
        (_head(kind=FrameType.HELLO, body=struct.pack("<H", 65535)), "bad_body"),
        (_head(kind=FrameType.HELLO_OK, body=b"\x01\x00\xff" + bytes(8)), "bad_body"),
        (_head(kind=FrameType.HELLO_OK, body=bytes(10) + b"\x03" + bytes(8)), "bad_body"),
        (_head(kind=FrameType.HELLO_OK, body=bytes(10) + b"\x02"), "bad_body"),
        (_head(kind=FrameType.PULL, body=bytes(29) + b"\0\0"), "bad_body"),
        (_head(kind=FrameType.PULL, body=bytes(29) + b"\1\0" + bytes(12)), "bad_body"),
        (_head(kind=FrameType.QUERY, body=bytes(16)), "bad_payload_size"),
        (
            _head(kind=FrameType.QUERY, body=bytes(14) + b"\1\x40" + bytes(16385), payload_bytes=1),
            "bad_body",
        ),
        (_head(kind=FrameType.QUERY, body=bytes(16), payload_bytes=2**40), "bad_payload_size"),
        (_head(kind=FrameType.QUERY, flags=2, body=bytes(16), payload_bytes=1), "bad_flags"),
    ],
)
def test_malformed_heads_are_named(data: bytes, reason: str) -> None:
    assert _reason(data) == reason


@pytest.mark.parametrize(
    ("runs", "payload_bytes", "reason"),
    [
        ([(0, 1)], 7, "bad_payload_size"),
        ([(0, 1)], 16, "bad_payload_size"),
        ([(0, 2**32 - 1)] * 2, 2**64 - 1, "bad_payload_size"),
        ([(0, 0)], 8, "bad_body"),
        ([], 8, "bad_body"),
        ([(0, 1)] * 4097, 8 * 4097, "bad_body"),
    ],
)
def test_runs_and_payload_must_agree(
    runs: list[tuple[int, int]], payload_bytes: int, reason: str
) -> None:
    body = struct.pack("<QQQIB", 1, 1, 1, 0, 0) + struct.pack("<H", len(runs))
    body += b"".join(struct.pack("<II", *run) for run in runs)

    assert _reason(_head(kind=FrameType.PUT, body=body, payload_bytes=payload_bytes)) == reason


@pytest.mark.parametrize(
    ("part", "payload_bytes", "reason"),
    [
        ((0, 8), 9, "bad_payload_size"),
        ((0, 4), 8, "bad_payload_size"),
        ((5, 4), 4, "bad_payload_size"),
        ((2**32 - 1, 2**32 - 1), 2**32 - 1, "bad_payload_size"),
        ((0, 0), 8, "bad_body"),
    ],
)
def test_a_part_lies_within_the_block(
    part: tuple[int, int], payload_bytes: int, reason: str
) -> None:
    body = struct.pack("<QQQIB", 1, 1, 1, 0, 0) + struct.pack("<HII", 1, 0, 1)
    body += struct.pack("<II", *part)

    head = _head(kind=FrameType.PUT, flags=4, body=body, payload_bytes=payload_bytes)
    assert _reason(head) == reason


HELLO = HelloFrame(WorkerId("p0"), 3, WorkerId("d0"), 7, LAYOUT)
RANK = replace(LAYOUT, dtype="float8_e4m3fn", engine="vllm", order="BLHNC", tp_rank=1, tp_size=2)


def test_a_layout_that_is_not_ours_is_said_in_words() -> None:
    frame = replace(HELLO, layout=RANK)
    raw = encode_frame(frame)
    assert b"float8_e4m3fn vllm BLHNC 1 2" in raw
    assert LAYOUT.dtype.encode() + struct.pack("<I", 16) in encode_frame(HELLO), "as it ever was"
    assert _feed(FrameDecoder(BLOCK_BYTES), raw) == [frame]
    for wrong in ({"tp_rank": -1}, {"tp_size": 10**7}, {"engine": "a b"}):
        unclear = replace(HELLO, layout=replace(RANK, **wrong))
        assert _reason(encode_frame(unclear)) == "bad_body"


LAYOUT_NAMED = (KvLayout("x" * 1025, "f", 1, 1, 1, 1), KvLayout("m", "x" * 1025, 1, 1, 1, 1))
SEGMENT_NAMED = LinkOffer(1, 0, Checksum.NONE, 1, SegmentOffer("x" * 1025, 0, b""))


@pytest.mark.parametrize(
    "frame",
    [
        replace(HELLO, worker_id=WorkerId("x" * 1025)),
        replace(HELLO, peer_worker_id=WorkerId("x" * 1025)),
        *(replace(HELLO, layout=layout) for layout in LAYOUT_NAMED),
        replace(HELLO, link=SEGMENT_NAMED),
        HelloOkFrame(WorkerId("x" * 1025), 1),
        ErrorFrame(1, "x" * 1025, ""),
    ],
)
def test_names_have_a_bound(frame: Frame) -> None:
    """They end up in logs and in labels of metrics."""
    assert _reason(encode_frame(frame)) == "bad_body"


def test_a_message_that_is_longer_than_one_may_be_is_not_passed_on() -> None:
    body = struct.pack("<QBI", 1, 0, 0) + struct.pack("<H", 0)
    for size, fits in ((1024, True), (1025, False)):
        head = _head(kind=FrameType.ERROR, body=body + struct.pack("<H", size) + b"x" * size)
        assert fits or _reason(head) == "bad_body"
        assert not fits or _feed(FrameDecoder(BLOCK_BYTES), head) == [ErrorFrame(1, "", "x" * size)]


@pytest.mark.parametrize("kind", [FrameType.GET, FrameType.COMMIT, FrameType.DATA])
def test_only_writes_have_parts(kind: FrameType) -> None:
    payload_bytes = 8 if kind is FrameType.DATA else 0
    head = _head(kind=kind, flags=4, body=struct.pack("<Q", 1), payload_bytes=payload_bytes)
    assert _reason(head) == "bad_flags"


def test_a_long_message_is_cut_between_characters() -> None:
    frame = ErrorFrame(1, "invalid", "ß" * 2000)
    (decoded,) = _feed(FrameDecoder(BLOCK_BYTES), encode_frame(frame))

    assert decoded == ErrorFrame(1, "invalid", "ß" * 512)
