"""The data channel's frames as values. `codec.py` turns them into bytes and back.

Tests: tests/contract/test_frames_golden.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvmesh.core.types import KvLayout, WorkerId

MAGIC = b"KVMT"
VERSION = 1
MAX_BODY_BYTES = 64 * 1024
MAX_RUNS = 4096
"""Runs in one PUT; 32 KiB of its body."""
MAX_MESSAGE_BYTES = 1024

FLAG_CHECKSUM = 1
"""PUT: the payload is followed by its crc32."""
FLAG_LAST = 2
"""PUT: no more frames of this transfer follow."""


class FrameType(enum.IntEnum):
    """Numbers on the wire. GET and QUERY are reserved; a receiver answers ERROR "unsupported"."""

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


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks from index `first` of a reservation (not block ids of the pool)."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WriteClaim:
    """By what right a frame writes: a reservation, its attempt, and its secret."""

    reservation_id: int
    incarnation: int
    generation: int
    capability: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class HelloFrame:
    """First frame of a channel.

    Attributes:
        worker_id, incarnation: who speaks.
        peer_worker_id, peer_incarnation: who the speaker believes to have reached.
        layout: KV memory of the speaker; must equal the receiver's.
    """

    worker_id: WorkerId
    incarnation: int
    peer_worker_id: WorkerId
    peer_incarnation: int
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class HelloOkFrame:
    """The channel is open."""

    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class PutFrame:
    """Announces KV bytes for runs of a reservation, in order; the bytes follow.

    Attributes:
        transfer_id: rises with each transfer of the channel; a transfer may have several PUTs.
        last: no more PUTs of this transfer follow.
        checksum: the payload is followed by its crc32.
    """

    transfer_id: int
    claim: WriteClaim
    runs: tuple[BlockRun, ...]
    last: bool = True
    checksum: bool = True

    @property
    def num_blocks(self) -> int:
        """Blocks in the payload."""
        return sum(run.count for run in self.runs)


@dataclass(frozen=True, slots=True)
class PutOkFrame:
    """Bytes of the transfer's payloads, counted from its start, that are in their blocks."""

    transfer_id: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class CommitFrame:
    """Says that the reservation's KV is complete.

    Attributes:
        first_token_id: the token that prefill sampled.
        num_tokens: positions with KV, the receiver's own cached prefix included.
        num_blocks: blocks that the sender has written.
    """

    transfer_id: int
    claim: WriteClaim
    first_token_id: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CommitOkFrame:
    """The receiver took the KV over."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class CancelFrame:
    """The sender stops in the middle of a transfer; nothing of it follows and no answer comes."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class ErrorFrame:
    """A no to one transfer, or with transfer id 0 the end of the channel.

    Attributes:
        reason: a `RefusalReason` value or a word of the channel (`protocol.CHANNEL_REASONS`).
        work_done, retry_after_ms: as in `Refusal`.
    """

    transfer_id: int
    reason: str
    message: str
    work_done: bool = False
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReservedFrame:
    """GET or QUERY: after the transfer id the body is not defined in this version."""

    type: FrameType
    transfer_id: int


Frame = (
    HelloFrame
    | HelloOkFrame
    | PutFrame
    | PutOkFrame
    | CommitFrame
    | CommitOkFrame
    | CancelFrame
    | ErrorFrame
    | ReservedFrame
)
