"""State of the receiving end of a data channel. Pure: frames in, actions out, no socket, no clock.

    receiver:  NEW --HELLO--> OPEN <--PUT / payload--> OPEN      anything else: ProtocolError
    sender:    NEW --HELLO_OK--> OPEN

A transfer is one or more PUTs with one id, the last one marked, or one PULL, GET or COMMIT. The
answer is PUT_OK after each PUT or PULL, DATA, COMMIT_OK, or one ERROR, after which the receiver
drops the rest of the transfer. Ids rise, so the sender can tell an answer to a transfer that it
gave up from an invented answer. The sender's end is in `sender_protocol.py`.
Tests: tests/unit/transfer/test_protocol.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmesh.core.errors import ProtocolError
from kvmesh.core.mesh_secret import MeshSecret
from kvmesh.core.types import KvLayout, Refusal, RefusalReason, WorkerId
from kvmesh.transfer.bodies import encode_body
from kvmesh.transfer.checksums import agree_checksum
from kvmesh.transfer.frames import (
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
    PutFrame,
    PutOkFrame,
    QueryFrame,
)
from kvmesh.transfer.layouts import layout_difference
from kvmesh.transfer.run_table import end_of

CHANNEL = 0
"""Transfer id of an ERROR that ends the channel."""

MAX_OPEN_TRANSFERS = 1024

PROOF_PURPOSE = "data hello"
"""Purpose of the proof in a HELLO, which covers the receiver's incarnation: no other accepts it."""

PLAIN_TERMS = LinkTerms(Checksum.CRC32, window_bytes=0)
"""Terms of a connection whose HELLO carried no offer."""

CHANNEL_REASONS = {
    "layout": RefusalReason.INVALID,
    "identity": RefusalReason.STALE,
    "secret": RefusalReason.INVALID,
    "unsupported": RefusalReason.INVALID,
    "checksum": RefusalReason.LOST,
    "mapping": RefusalReason.INVALID,
    "engine": RefusalReason.LOST,
}
"""Refusal reason of each reason that the channel itself puts into ERROR frames."""


@dataclass(frozen=True, slots=True)
class ChannelIdentity:
    """One end of a channel: an incarnation of a worker and the shape of its KV memory.

    Attributes:
        secret: the mesh's secret. The opener of a channel proves it, and the receiver checks it.
    """

    worker_id: WorkerId
    incarnation: int
    layout: KvLayout
    secret: MeshSecret | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a frame; close the channel afterwards if `close`."""

    frame: Frame
    close: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """Ask the target for the payload's blocks."""

    put: PutFrame


@dataclass(frozen=True, slots=True)
class Copy:
    """Ask the target for the blocks and copy them out of the sender's pool."""

    pull: PullFrame


@dataclass(frozen=True, slots=True)
class Read:
    """Ask the source for the blocks and send them."""

    get: GetFrame


@dataclass(frozen=True, slots=True)
class Ask:
    """Receive the operands of a query, compute the answer and send it."""

    query: QueryFrame


@dataclass(frozen=True, slots=True)
class Drain:
    """Send the reply if there is one, then read and drop the payload."""

    frame: PutFrame | QueryFrame
    reply: ErrorFrame | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Ask the target to commit the reservation."""

    frame: CommitFrame


@dataclass(frozen=True, slots=True)
class Forget:
    """Do nothing."""


ReceiverAction = Reply | Write | Copy | Read | Ask | Drain | Commit | Forget


@dataclass(slots=True)
class _Incoming:
    received_bytes: int = 0
    refused: bool = False


class ReceiverMachine:
    """The receiving end of a channel.

    Attributes:
        peer: the worker that opened the channel; None before its HELLO was accepted.
        offer: the link offer of its HELLO.
        terms: the agreed terms, once the channel is open.
        block_bytes: bytes of one KV block, the same on both sides.
    """

    def __init__(
        self,
        identity: ChannelIdentity,
        terms: LinkTerms = PLAIN_TERMS,
        ops: frozenset[int] = frozenset(),
    ) -> None:
        """Takes the `terms` that this end prefers and the `ops` (computations) that it offers."""
        self._identity, self._ops = identity, ops
        self.block_bytes = identity.layout.block_bytes
        self._wishes = terms
        self.offer: LinkOffer | None = None
        self.terms = PLAIN_TERMS
        self._transfers: dict[int, _Incoming] = {}
        self._newest_transfer_id = CHANNEL
        self.peer: WorkerId | None = None

    @property
    def has_pool(self) -> bool:
        """Whether the peer's pool can be read; such a channel carries no payloads."""
        return self.offer is not None and self.offer.pool_blocks > 0

    def turn_away(self, reason: str, message: str) -> ErrorFrame:
        """Withdraws an accepted HELLO before it was answered; returns the ERROR to send instead."""
        self.peer = None
        return ErrorFrame(CHANNEL, reason, message)

    def receive(self, frame: Frame) -> ReceiverAction:
        """Returns the action for a frame; a PUT is passed in when its payload starts.

        Raises:
            ProtocolError: unexpected_frame, reordered_transfer or too_many_transfers. The caller
                sends `last_word` and closes.
        """
        if self.peer is None:
            return self._hello(frame)
        match frame:
            case PutFrame() | QueryFrame() if self.has_pool:
                raise ProtocolError("unexpected_frame", "a payload where blocks are pulled")
            case PutFrame():
                return self._put(frame)
            case PullFrame():
                return self._pull(frame)
            case QueryFrame() if frame.op in self._ops:
                self._open(frame.transfer_id)
                return Ask(frame)
            case QueryFrame():
                message = f"op {frame.op} is not computed here"
                return Drain(frame, ErrorFrame(frame.transfer_id, "unsupported", message))
            case CommitFrame() | GetFrame():
                self._open(frame.transfer_id)
                if frame.claim.incarnation != self._identity.incarnation:
                    return Reply(self._close(frame.transfer_id, self._stale()))
                return Commit(frame) if isinstance(frame, CommitFrame) else Read(frame)
            case CancelFrame():
                self._transfers.pop(frame.transfer_id, None)
                return Forget()
        raise ProtocolError("unexpected_frame", f"{type(frame).__name__} on an open channel")

    def write_refused(self, put: PutFrame, refusal: Refusal) -> Drain:
        """Answers the target's refusal at once, so that the sender stops; drops the payload."""
        self._transfers[put.transfer_id].refused = True
        return Drain(put, _error(put.transfer_id, refusal))

    def payload_received(self, put: PutFrame, num_bytes: int, *, intact: bool) -> Frame | None:
        """Records that the payload was read to its end; returns the answer, if there is one."""
        transfer = self._transfers[put.transfer_id]
        answer: Frame | None = None
        if not transfer.refused:
            if intact:
                transfer.received_bytes += num_bytes
                answer = PutOkFrame(put.transfer_id, transfer.received_bytes)
            else:
                transfer.refused = True
                answer = ErrorFrame(put.transfer_id, "checksum", "the payload's sum is wrong")
        if put.last:
            del self._transfers[put.transfer_id]
        return answer

    def pull_answered(self, pull: PullFrame, refusal: Refusal | None) -> Frame:
        """Returns the answer to a PULL: the blocks were copied, or the target refused."""
        if refusal is not None:
            return self._close(pull.transfer_id, refusal)
        del self._transfers[pull.transfer_id]
        each = self.block_bytes if pull.part is None else pull.part.size
        return PutOkFrame(pull.transfer_id, pull.num_blocks * each)

    def refused(self, frame: GetFrame | QueryFrame, refusal: Refusal) -> ErrorFrame:
        """Returns the answer to a GET or QUERY that was refused."""
        return self._close(frame.transfer_id, refusal)

    def answered(self, frame: GetFrame | QueryFrame, num_bytes: int, *, checksum: bool) -> Frame:
        """Returns the frame that precedes the `num_bytes` of an answer to a GET or QUERY."""
        del self._transfers[frame.transfer_id]
        return DataFrame(frame.transfer_id, num_bytes, checksum)

    def commit_answered(self, frame: CommitFrame, refusal: Refusal | None) -> Frame:
        """Returns the answer to a COMMIT after the target's decision."""
        if refusal is not None:
            return self._close(frame.transfer_id, refusal)
        del self._transfers[frame.transfer_id]
        return CommitOkFrame(frame.transfer_id)

    def _hello(self, frame: Frame) -> Reply:
        me = self._identity
        if not isinstance(frame, HelloFrame):
            raise ProtocolError("unexpected_frame", f"{type(frame).__name__} before HELLO")
        # This check is first, so that strangers do not learn which worker this is.
        if not self._is_member(frame):
            message = "the greeting does not prove that its sender holds this mesh's secret"
            return Reply(ErrorFrame(CHANNEL, "secret", message), close=True)
        if (frame.peer_worker_id, frame.peer_incarnation) != (me.worker_id, me.incarnation):
            asked = f"{frame.peer_worker_id}/{frame.peer_incarnation}"
            message = f"this is {me.worker_id}/{me.incarnation}, not {asked}"
            return Reply(ErrorFrame(CHANNEL, "identity", message), close=True)
        if frame.layout != me.layout:
            message = layout_difference(frame.layout, me.layout)
            return Reply(ErrorFrame(CHANNEL, "layout", message), close=True)
        self.peer, self.offer = frame.worker_id, frame.link
        if frame.link is None:
            return Reply(HelloOkFrame(me.worker_id, me.incarnation))
        checksum = agree_checksum(frame.link.checksum, self._wishes.checksum)
        self.terms = LinkTerms(checksum, self._wishes.window_bytes)
        return Reply(HelloOkFrame(me.worker_id, me.incarnation, self.terms))

    def _is_member(self, hello: HelloFrame) -> bool:
        secret = self._identity.secret
        if secret is None:
            return True
        body = encode_body(replace(hello, proof=b""))
        return secret.accepts(hello.proof, PROOF_PURPOSE, body)

    def _pull(self, pull: PullFrame) -> Copy | Reply:
        self._open(pull.transfer_id)
        pool_blocks = self.offer.pool_blocks if self.offer is not None else 0
        if pull.claim.incarnation != self._identity.incarnation:
            return Reply(self._close(pull.transfer_id, self._stale()))
        if end_of(pull.runs) > pool_blocks:
            message = f"a run ends outside of the sender's {pool_blocks} blocks"
            refusal = Refusal(RefusalReason.INVALID, message)
            return Reply(self._close(pull.transfer_id, refusal))
        if pull.part is not None and pull.part.offset + pull.part.size > self.block_bytes:
            refusal = Refusal(RefusalReason.INVALID, f"{pull.part} of blocks of {self.block_bytes}")
            return Reply(self._close(pull.transfer_id, refusal))
        return Copy(pull)

    def _put(self, put: PutFrame) -> Write | Drain:
        transfer = self._transfers.get(put.transfer_id)
        if transfer is None:
            transfer = self._open(put.transfer_id)
        if transfer.refused:
            return Drain(put, None)
        if put.claim.incarnation != self._identity.incarnation:
            return self.write_refused(put, self._stale())
        return Write(put)

    def _open(self, transfer_id: int) -> _Incoming:
        if transfer_id <= self._newest_transfer_id:
            raise ProtocolError(
                "reordered_transfer", f"{transfer_id} after {self._newest_transfer_id}"
            )
        if len(self._transfers) >= MAX_OPEN_TRANSFERS:
            raise ProtocolError("too_many_transfers", f"{MAX_OPEN_TRANSFERS} are open")
        self._newest_transfer_id = transfer_id
        transfer = self._transfers[transfer_id] = _Incoming()
        return transfer

    def _close(self, transfer_id: int, refusal: Refusal) -> ErrorFrame:
        del self._transfers[transfer_id]
        return _error(transfer_id, refusal)

    def _stale(self) -> Refusal:
        message = f"this worker's incarnation is {self._identity.incarnation}"
        return Refusal(RefusalReason.STALE, message)


def last_word(error: ProtocolError) -> ErrorFrame:
    """Returns the frame that tells a peer why its channel ends."""
    return ErrorFrame(CHANNEL, error.reason, str(error))


def refusal_of(frame: ErrorFrame) -> Refusal:
    """Converts an ERROR frame to a refusal; an unknown reason counts as invalid."""
    try:
        return Refusal(
            RefusalReason(frame.reason), frame.message, frame.work_done, frame.retry_after_ms
        )
    except ValueError:
        reason = CHANNEL_REASONS.get(frame.reason, RefusalReason.INVALID)
        return Refusal(reason, f"{frame.reason}: {frame.message}", frame.work_done)


def _error(transfer_id: int, refusal: Refusal) -> ErrorFrame:
    return ErrorFrame(
        transfer_id,
        refusal.reason.value,
        refusal.message,
        refusal.work_done,
        refusal.retry_after_ms,
    )
