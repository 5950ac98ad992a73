"""The data channel's frames as values. `codec.py` turns them into bytes and back.

Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvmesh.core.types import KvLayout, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.run_table import RunTable, as_runs, num_blocks_of

MAGIC = b"KVMT"
VERSION = 1
MAX_BODY_BYTES = 64 * 1024
MAX_RUNS = 4096
"""Maximum number of runs in one PUT; 32 KiB of its body."""
MAX_NAME_BYTES = 1024
"""Maximum bytes of worker ids and other names, which appear in logs and metric labels."""
MAX_MESSAGE_BYTES = 1024
MAX_ARGUMENT_BYTES = 16 * 1024
MAX_OPERAND_BYTES = 64 << 20
MAX_METADATA_BYTES = 32 * 1024

FLAG_CHECKSUM = 1
"""PUT, QUERY, DATA: a checksum follows the payload."""
FLAG_LAST = 2
"""PUT: no more frames of this transfer follow."""
FLAG_PART = 4
"""PUT, PULL: only a part of each block is written."""
FLAG_PROOF = 8
"""HELLO: the body begins with a proof that the sender holds the mesh's secret."""


class Checksum(enum.IntEnum):
    """Checksum of payloads; the values are numbers on the wire."""

    NONE = 0
    CRC32 = 1
    CRC32C = 2


class FrameType(enum.IntEnum):
    """Type of a frame; the values are numbers on the wire."""

    HELLO = 1
    HELLO_OK = 2
    PUT = 3
    PUT_OK = 4
    COMMIT = 5
    COMMIT_OK = 6
    CANCEL = 7
    ERROR = 8
    GET = 9
    QUERY = 10
    PULL = 11
    DATA = 12


# Runs are tuples, not dataclasses: a transfer of scattered blocks has thousands. Their `count`
# hides the method of tuples.


class BlockRun(NamedTuple):
    """`count` blocks from index `first` of a reservation (not block ids of the pool)."""

    first: int
    count: int  # type: ignore[assignment]


class PullRun(NamedTuple):
    """`count` blocks from block `source` of the sender's pool, for indexes from `first`."""

    source: int
    first: int
    count: int  # type: ignore[assignment]


class BlockPart(NamedTuple):
    """The same bytes of every block, such as some layers: `size` bytes from `offset` on."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SegmentOffer:
    """The sender's pool as memory that a transfer engine has registered for reading.

    Attributes:
        engine: name of the engine.
        address: address of block 0 in the engine's terms.
        metadata: connection data for the reading engine; at most `MAX_METADATA_BYTES`.
    """

    engine: str
    address: int
    metadata: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """The sender's offer for a connection; without one the terms are crc32 and no window.

    Attributes:
        link_id: random number, equal for all connections (lanes) of one channel. A new connection
            of the same lane replaces the previous one.
        lane: number of this connection within the channel.
        checksum: checksum that the sender asks for.
        pool_blocks: number of blocks of the sender's pool that the receiver may read; 0 for none.
        segment: registered memory to read them from; None if the pool's memfd came with this frame.
    """

    link_id: int
    lane: int
    checksum: Checksum
    pool_blocks: int = 0
    segment: SegmentOffer | None = None


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """Terms of a connection, decided by the receiver.

    Attributes:
        checksum: checksum of payloads on this connection.
        window_bytes: maximum payload bytes in flight without an answer.
    """

    checksum: Checksum
    window_bytes: int


@dataclass(frozen=True, slots=True)
class HelloFrame:
    """First frame of a channel.

    Attributes:
        worker_id, incarnation: the sender.
        peer_worker_id, peer_incarnation: the worker that the sender intends to reach.
        layout: KV memory of the sender; must equal the receiver's.
        proof: HMAC of the rest of the body; empty in a mesh without a secret.
    """

    worker_id: WorkerId
    incarnation: int
    peer_worker_id: WorkerId
    peer_incarnation: int
    layout: KvLayout
    link: LinkOffer | None = None
    proof: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class HelloOkFrame:
    """Opens the channel; `terms` answer an offer."""

    worker_id: WorkerId
    incarnation: int
    terms: LinkTerms | None = None


@dataclass(frozen=True, slots=True)
class PutFrame:
    """Announces KV bytes for runs of a reservation, in order; the bytes follow.

    Attributes:
        transfer_id: rises with each transfer of the channel; a transfer may have several PUTs.
        last: no more PUTs of this transfer follow.
        checksum: whether a checksum follows the payload.
        part: the bytes of each block in the payload; None for whole blocks.
    """

    transfer_id: int
    claim: WriteClaim
    runs: Sequence[BlockRun]
    last: bool = True
    checksum: bool = True
    part: BlockPart | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the payload."""
        return num_blocks_of(self.runs)


@dataclass(frozen=True, slots=True)
class PullFrame:
    """Asks the receiver to copy blocks out of the sender's pool, which it can read.

    The sender leaves the blocks alone until the answer, a PUT_OK or an ERROR.

    Attributes:
        part: as in PUT.
    """

    transfer_id: int
    claim: WriteClaim
    runs: Sequence[PullRun]
    part: BlockPart | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks to copy."""
        return num_blocks_of(self.runs)

    def as_put(self) -> PutFrame:
        """Returns the PUT that writes the same blocks; joins runs with consecutive targets."""
        runs = _joined(self.runs)
        return PutFrame(self.transfer_id, self.claim, runs, checksum=False, part=self.part)


@dataclass(frozen=True, slots=True)
class PutOkFrame:
    """Answers a PUT or PULL with the number of the transfer's bytes that are in their blocks."""

    transfer_id: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class CommitFrame:
    """Declares the reservation's KV complete.

    Attributes:
        first_token_id: the token that prefill sampled.
        num_tokens: positions with KV, the receiver's own cached prefix included.
        num_blocks: number of blocks that the sender has written.
    """

    transfer_id: int
    claim: WriteClaim
    first_token_id: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CommitOkFrame:
    """The receiver has taken over the KV."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class CancelFrame:
    """Aborts a transfer: the sender sends no more of it, and no answer comes."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """Refuses one transfer, or with transfer id 0 ends the channel.

    Attributes:
        reason: a `RefusalReason` value or one of `protocol.CHANNEL_REASONS`.
        work_done, retry_after_ms: as in `Refusal`.
    """

    transfer_id: int
    reason: str
    message: str
    work_done: bool = False
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class QueryFrame:
    """Asks for a computation next to the receiver's KV; its operands follow as payload.

    Attributes:
        op: number of the computation; a receiver without it answers ERROR "unsupported".
        answer_bytes: room that the sender has for the answer, which is its credit: a receiver
            never sends more.
        arguments: arguments of the op, at most `MAX_ARGUMENT_BYTES`.
        operand_bytes: size of the payload; the connection's window applies as to PUT.
    """

    transfer_id: int
    op: int
    answer_bytes: int
    arguments: bytes
    operand_bytes: int
    checksum: bool = True


@dataclass(frozen=True, slots=True)
class GetFrame:
    """Requests blocks of the receiver's pool; DATA or an ERROR answers.

    The sender has room for the requested blocks, which is the credit of the answer.

    Attributes:
        claim: the lease that keeps the blocks; runs name indexes of it, not block ids.
    """

    transfer_id: int
    claim: WriteClaim
    runs: Sequence[BlockRun]

    @property
    def num_blocks(self) -> int:
        """Number of requested blocks."""
        return num_blocks_of(self.runs)


@dataclass(frozen=True, slots=True)
class DataFrame:
    """Answers a GET or QUERY; the payload follows: the blocks in order, or the result.

    Attributes:
        num_bytes: size of the payload.
        checksum: whether a checksum follows the payload.
    """

    transfer_id: int
    num_bytes: int
    checksum: bool = True


Frame = (
    HelloFrame
    | HelloOkFrame
    | PutFrame
    | PullFrame
    | QueryFrame
    | PutOkFrame
    | CommitFrame
    | CommitOkFrame
    | CancelFrame
    | ErrorFrame
    | GetFrame
    | DataFrame
)


def _joined(pulled: Sequence[PullRun]) -> Sequence[BlockRun]:
    """Returns the target runs, with consecutive ones joined."""
    if type(pulled) is RunTable:
        first, count = pulled.numbers[:, 1], pulled.numbers[:, 2]
        end = first + count
        starts = np.flatnonzero(np.concatenate(([True], first[1:] != end[:-1])))
        ends = end[np.append(starts[1:], len(end)) - 1]
        return as_runs(BlockRun._make, np.column_stack((first[starts], ends - first[starts])))
    runs: list[BlockRun] = []
    start = last = pulled[0].first
    for _, begin, size in pulled:
        if begin != last:
            runs.append(BlockRun(start, last - start))
            start = begin
        last = begin + size
    runs.append(BlockRun(start, last - start))
    return tuple(runs)
