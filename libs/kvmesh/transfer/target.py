"""Interfaces of a worker whose blocks peers write to or read from.

Tests: tests/integration/test_transfer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.types import Refusal, RefusalReason, WorkerId
from kvmesh.transfer.device import Pieces
from kvmesh.transfer.frames import CommitFrame, GetFrame, PutFrame
from kvmesh.transfer.native import num_bytes_of
from kvmesh.transfer.pacing import Share


@dataclass(frozen=True, slots=True, eq=False)
class WriteGrant:
    """Permission to fill memory; grants are compared by identity.

    Attributes:
        put: the frame that it answers.
        views: writable, contiguous; filled in order. Their sizes add up to the frame's blocks, or
            to the parts of them that it names. For many views use `PlacedViews`.
        pieces: places in a device pool, instead of views.
    """

    put: PutFrame
    views: Sequence[memoryview]
    pieces: Pieces | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory to fill."""
        return num_bytes_of(self.views) if self.pieces is None else self.pieces.num_bytes


@dataclass(frozen=True, slots=True)
class AlreadyThere:
    """The reservation is complete: the payload is dropped, and answered as if it was written."""


class WriteTarget(Protocol):
    """Receives KV. All methods are called on the event loop and must not block it.

    Only the target knows reservations, so it checks each claim: the reservation is alive,
    incarnation and generation are current, the capability matches (`hmac.compare_digest`), and the
    runs lie in the reservation. The channel has checked only the incarnation.
    """

    def begin_write(self, put: PutFrame) -> WriteGrant | AlreadyThere | Refusal:
        """Returns the memory for the payload, or a refusal.

        From a grant until its `end_write` the blocks stay the reservation's, even if it is
        cancelled or its lease ends. A refused payload is read and dropped; the channel stays open.
        """
        ...

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        """Ends a grant; called once for each, with True if its memory holds the sender's bytes.

        With False (channel lost, checksum wrong) the content of the memory is undefined; the sender
        may write it again.
        """
        ...

    def commit(self, frame: CommitFrame) -> Refusal | None:
        """Takes over a reservation when all its blocks are there, maybe now; None if it does.

        A sender whose answer was lost asks again, maybe on another channel, and gets the same
        answer.
        """
        ...

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Called once for each channel of this peer that ended, for any reason, after `end_write`.

        The peer may already have another channel.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReadGrant:
    """Permission to read memory.

    Attributes:
        get: the frame that it answers.
        views: contiguous; sent in order. Their sizes add up to the frame's blocks.
        pieces: places in a device pool, instead of views.
        share: priority of the bytes in the holder's egress budget.
    """

    get: GetFrame
    views: Sequence[memoryview]
    pieces: Pieces | None = None
    share: Share = Share.READ


class ReadSource(Protocol):
    """Gives blocks to readers. All methods run on the event loop and must not block it.

    Only the source knows the readers' rights, so it checks each claim, as `WriteTarget` does. The
    channel has checked only the incarnation.
    """

    def begin_read(self, get: GetFrame) -> ReadGrant | Refusal:
        """Returns the places of the blocks, which stay unchanged until the grant's `end_read`."""
        ...

    def end_read(self, grant: ReadGrant) -> None:
        """Ends a grant; called once for each, whether or not the bytes arrived."""
        ...


class NothingToRead:
    """The source of a worker that refuses all reads."""

    def begin_read(self, get: GetFrame) -> ReadGrant | Refusal:
        """Refuses the read."""
        return Refusal(RefusalReason.INVALID, "nothing is read from this worker")

    def end_read(self, grant: ReadGrant) -> None:
        """Never called."""
