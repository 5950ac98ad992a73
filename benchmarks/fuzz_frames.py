"""Feeds the decoder and both state machines with damaged and random bytes; nothing may get through.

    python -m benchmarks.fuzz_frames                  # one million inputs
    python -m benchmarks.fuzz_frames --inputs 10000

Each input is a stream of valid frames that was damaged (bits flipped, cut, pieces swapped, repeated
or replaced, heads with wrong fields and right checksums), or plain random bytes, fed in pieces. The
only exception that may come out is ProtocolError, and no write may be granted that a whole, valid
frame did not ask for.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.result import RESULTS, Target, document, markdown, save
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.codec import TRAILER, encode_frame
from kvmesh.transfer.decoder import FrameDecoder, PayloadBytes, PayloadEnd, PayloadStart
from kvmesh.transfer.frames import (
    BlockPart,
    BlockRun,
    CancelFrame,
    Checksum,
    CommitFrame,
    CommitOkFrame,
    DataFrame,
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
    QueryFrame,
)
from kvmesh.transfer.protocol import ChannelIdentity, Copy, Read, ReceiverMachine, Write
from kvmesh.transfer.sender_protocol import SenderMachine

LAYOUT = KvLayout("fuzz", "float16", 1, 1, 1, 2)
BLOCK = LAYOUT.block_bytes
ME, PEER = WorkerId("d0"), WorkerId("p0")
_HEADER = struct.Struct("<4sBBHIQI")


def wire(frame: Frame, rng: random.Random) -> bytes:
    """A whole frame with its payload and a sum that fits."""
    if isinstance(frame, PutFrame):
        each = BLOCK if frame.part is None else frame.part.size
        payload = rng.randbytes(frame.num_blocks * each)
    elif isinstance(frame, DataFrame):
        payload = rng.randbytes(frame.num_bytes)
    elif isinstance(frame, QueryFrame):
        payload = rng.randbytes(frame.operand_bytes)
    else:
        return encode_frame(frame)
    trailer = TRAILER.pack(zlib.crc32(payload)) if frame.checksum else b""
    return encode_frame(frame, len(payload)) + payload + trailer


def frame_of(rng: random.Random) -> Frame:
    """Some valid frame."""
    claim = WriteClaim(rng.getrandbits(64), rng.choice((7, 7, 8)), 1, rng.randbytes(4))
    number = rng.choice((0, 1, 2, 3, rng.getrandbits(64)))
    offer = rng.choice((None, LinkOffer(1, 0, Checksum.CRC32, rng.choice((0, 4)))))
    makers = (
        lambda: HelloFrame(PEER, 3, ME, 7, LAYOUT, offer),
        lambda: HelloOkFrame(ME, 7, rng.choice((None, LinkTerms(Checksum.CRC32, 9)))),
        lambda: PutFrame(
            number,
            claim,
            (BlockRun(0, rng.randrange(1, 9)),),
            rng.random() < 0.5,
            rng.random() < 0.5,
            rng.choice((None, BlockPart(0, BLOCK), BlockPart(1, BLOCK - 1))),
        ),
        lambda: PullFrame(number, claim, (PullRun(rng.randrange(6), 0, rng.randrange(1, 4)),)),
        lambda: QueryFrame(number, 1, 8, rng.randbytes(3), rng.randrange(1, 30), True),
        lambda: GetFrame(number, claim, (BlockRun(rng.randrange(6), rng.randrange(1, 4)),)),
        lambda: DataFrame(number, rng.randrange(1, 30), rng.random() < 0.5),
        lambda: PutOkFrame(number, rng.getrandbits(8)),
        lambda: CommitFrame(number, claim, 1, 2, 3),
        lambda: CommitOkFrame(number),
        lambda: CancelFrame(number),
        lambda: ErrorFrame(number, "stale", "gone"),
    )
    return rng.choice(makers)()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same with something wrong."""
    kind = rng.randrange(7)
    at = rng.randrange(len(data)) if data else 0
    if kind == 0:
        return data
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
    if kind == 4:
        return data[at:] + data[:at]
    if kind == 5:
        return data[:at] + data[rng.randrange(len(data)) :]
    return forged(rng) + data


def forged(rng: random.Random) -> bytes:
    """A head whose checksums fit and whose fields are anything."""
    body = rng.randbytes(rng.randrange(80))
    fields = (b"KVMT", rng.choice((1, 1, 2)), rng.randrange(14), rng.choice((0, 1, 2, 3, 4, 9)))
    sizes = (rng.choice((len(body), rng.getrandbits(32))), rng.choice((0, 8, rng.getrandbits(64))))
    checked = _HEADER.pack(*fields, *sizes, zlib.crc32(body))
    return checked + struct.pack("<I", zlib.crc32(checked)) + body


def asked_by(action: Write | Copy | Read) -> PutFrame | PullFrame | GetFrame:
    """The frame behind an action."""
    match action:
        case Write(put):
            return put
        case Copy(pull):
            return pull
        case Read(get):
            return get


def one_input(rng: random.Random, outcomes: Counter[str]) -> None:
    """Feeds one stream to a receiver, its answers to a sender."""
    frames = [frame_of(rng) for _ in range(rng.randrange(1, 4))]
    if rng.random() < 0.7:
        offer = LinkOffer(1, 0, Checksum.CRC32, rng.choice((0, 4)))
        frames.insert(0, HelloFrame(PEER, 3, ME, 7, LAYOUT, offer))
    valid = [wire(frame, rng) for frame in frames]
    data = damaged(b"".join(valid), rng) if rng.random() < 0.9 else rng.randbytes(60)
    allowed = {frame for frame in frames if isinstance(frame, PutFrame | PullFrame | GetFrame)}
    receiver = ReceiverMachine(ChannelIdentity(ME, 7, LAYOUT))
    sender = SenderMachine(ChannelIdentity(PEER, 3, LAYOUT), ME, 7)
    try:
        for frame in decoded(data, rng):
            try:
                sender.receive(frame)
            except ProtocolError as error:
                outcomes[f"sender: {error.reason}"] += 1
            action = receiver.receive(frame)
            outcomes[type(action).__name__] += 1
            if isinstance(action, Write | Copy | Read):
                asked = asked_by(action)
                # A forged head of random bytes cannot hold a claim that passes the target; here
                # it is enough that whoever writes was greeted and speaks of this life.
                assert receiver.peer == PEER, "a write before the greeting"
                assert asked.claim.incarnation == 7, "a write for another life"
                outcomes["granted as sent" if asked in allowed else "granted, altered"] += 1
            if isinstance(action, Write):
                receiver.payload_received(action.put, action.put.num_blocks * BLOCK, intact=True)
            elif isinstance(action, Copy):
                receiver.pull_answered(action.pull, None)
            elif isinstance(action, Read):
                receiver.answered(action.get, action.get.num_blocks * BLOCK, checksum=False)
    except ProtocolError as error:
        outcomes[error.reason] += 1


def decoded(data: bytes, rng: random.Random) -> Iterator[Frame]:
    """Frames of a stream that is fed in pieces."""
    decoder = FrameDecoder(BLOCK)
    view = memoryview(data)
    while view:
        size = rng.randrange(1, 64)
        piece, view = view[:size], view[size:]
        for event in decoder.feed(piece):
            if isinstance(event, PayloadStart):
                yield event.frame
            elif not isinstance(event, PayloadBytes | PayloadEnd):
                yield event


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description="fuzzes the data channel's decoder")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "fuzz_frames.json")
    arguments = parser.parse_args(argv)
    outcomes: Counter[str] = Counter()
    started = time.perf_counter()
    for index in range(arguments.inputs):
        # Each input has its own seed, so that one that fails can be run alone.
        one_input(random.Random(arguments.seed * 1_000_000_007 + index), outcomes)
    seconds = time.perf_counter() - started
    rows = [{"outcome": name, "count": count} for name, count in sorted(outcomes.items())]
    targets = [
        Target("inputs without a crash", float(arguments.inputs), 1_000_000.0),
        Target(
            "writes that no valid frame asked for", float(outcomes["granted, altered"]), 0.0, True
        ),
    ]
    notes = [f"{arguments.inputs} inputs in {seconds:.0f} s"]
    result = document(rows, targets, arguments.seed, notes)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
