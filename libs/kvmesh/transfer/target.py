"""What a worker implements to have KV written into its blocks, or read from them.

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
    """Leave to fill memory; each grant is its own, whatever it holds.

    Attributes:
        put: the frame that it answers.
        views: writable, contiguous; filled in order. Their sizes add up to the frame's blocks, or
            to the parts of them that it names. Many of them are best `PlacedViews`.
        pieces: of a device pool, instead of views.
    """

    put: PutFrame
    views: Sequence[memoryview]
    pieces: Pieces | None = None

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return num_bytes_of(self.views) if self.pieces is None else self.pieces.num_bytes


class WriteTarget(Protocol):
    """Receives KV. All methods are called on the event loop and must not block it.

    The target alone knows reservations, so it checks each claim: the reservation lives, incarnation
    and generation are the present ones, the capability matches (`hmac.compare_digest`), and the
    runs lie in the reservation. The channel has checked none of that but the incarnation.
    """

    def begin_write(self, put: PutFrame) -> WriteGrant | Refusal:
        """Says where the payload goes.

        From a grant until its `end_write` the blocks stay the reservation's, even if it is
        cancelled or its lease ends. A refused payload is read and dropped, the channel lives on.
        """
        ...

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        """Called once for each grant: with True when its memory holds the sender's bytes.

        With False (channel lost, checksum wrong) the memory holds anything; the sender may write
        it again.
        """
        ...

    def commit(self, frame: CommitFrame) -> Refusal | None:
        """Takes a complete reservation over; None is yes.

        A sender whose answer was lost asks again, maybe on another channel: the second time gets
        the first one's answer.
        """
        ...

    def peer_lost(self, worker_id: WorkerId) -> None:
        """A channel of this peer ended, in whatever way; called once for each, after `end_write`.

        The peer may already have another channel.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReadGrant:
    """Leave to read memory.

    Attributes:
        get: the frame that it answers.
        views: contiguous; sent in order. Their sizes add up to the frame's blocks.
        pieces: of a device pool, instead of views.
        share: of the holder's budget that the bytes leave by.
    """

    get: GetFrame
    views: Sequence[memoryview]
    pieces: Pieces | None = None
    share: Share = Share.READ


class ReadSource(Protocol):
    """Gives KV away. All methods are called on the event loop and must not block it.

    The source alone knows who may read what, so it checks each claim, as `WriteTarget` does; the
    channel has checked none of it but the incarnation.
    """

    def begin_read(self, get: GetFrame) -> ReadGrant | Refusal:
        """Says where the blocks are. They stay as they are until the grant's `end_read`."""
        ...

    def end_read(self, grant: ReadGrant) -> None:
        """Called once for each grant, whether or not the bytes arrived."""
        ...


class NothingToRead:
    """The source of a worker that gives nothing away."""

    def begin_read(self, get: GetFrame) -> ReadGrant | Refusal:
        """Says no."""
        return Refusal(RefusalReason.INVALID, "nothing is read from this worker")

    def end_read(self, grant: ReadGrant) -> None:
        """Never called."""
