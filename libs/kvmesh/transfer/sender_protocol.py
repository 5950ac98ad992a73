"""State of the opening end of a data channel, which writes or reads. Pure, like `protocol.py`.

Tests: tests/unit/transfer/test_protocol.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import Refusal, WorkerId
from kvmesh.transfer.bodies import encode_body
from kvmesh.transfer.frames import (
    CommitOkFrame,
    DataFrame,
    ErrorFrame,
    Frame,
    HelloFrame,
    HelloOkFrame,
    LinkOffer,
    PutOkFrame,
)
from kvmesh.transfer.protocol import (
    CHANNEL,
    CHANNEL_REASONS,
    PLAIN_TERMS,
    PROOF_PURPOSE,
    ChannelIdentity,
    refusal_of,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """The receiver accepted the HELLO."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The receiver has part or all of a transfer, or has committed."""

    transfer_id: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """The receiver refused a transfer."""

    transfer_id: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Ended:
    """The receiver has ended the channel."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Late:
    """The answer to a transfer that was given up."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Arriving:
    """The payload of a GET or QUERY follows; `data_received` is called when it was read."""

    transfer_id: int


SenderOutcome = Opened | Moved | Arriving | Refused | Ended | Late


class SenderMachine:
    """The end that opens a channel, to write or to read.

    Attributes:
        terms: the agreed terms, once the channel is open.
        block_bytes: bytes of one KV block, the same on both sides.
    """

    def __init__(
        self,
        identity: ChannelIdentity,
        peer_worker_id: WorkerId,
        peer_incarnation: int,
        offer: LinkOffer | None = None,
    ) -> None:
        self._identity = identity
        self.block_bytes = identity.layout.block_bytes
        self._peer = (peer_worker_id, peer_incarnation)
        self._offer = offer
        self._opened = False
        self._next_transfer_id = CHANNEL + 1
        self._open: dict[int, int | None] = {}
        self._gets: dict[int, int] = {}
        self._given_up = set[int]()
        self.terms = PLAIN_TERMS

    def hello(self) -> HelloFrame:
        """Returns the first frame to send."""
        me = self._identity
        hello = HelloFrame(me.worker_id, me.incarnation, *self._peer, me.layout, self._offer)
        if me.secret is None:
            return hello
        return replace(hello, proof=me.secret.proof(PROOF_PURPOSE, encode_body(hello)))

    def open_put(self, num_bytes: int) -> int:
        """Opens a transfer of `num_bytes` payload bytes; returns its id."""
        return self._new_transfer(num_bytes)

    def open_commit(self) -> int:
        """Opens a commit; returns its id."""
        return self._new_transfer(None)

    def open_get(self, num_bytes: int) -> int:
        """Opens a request for `num_bytes`; returns its id."""
        transfer_id = self._new_transfer(None)
        del self._open[transfer_id]
        self._gets[transfer_id] = num_bytes
        return transfer_id

    def data_received(self, transfer_id: int, *, intact: bool) -> Moved | Refused:
        """Ends a request whose payload was read to its end; returns the outcome."""
        self._close(transfer_id)
        if intact:
            return Moved(transfer_id, complete=True)
        refusal = Refusal(CHANNEL_REASONS["checksum"], "checksum: the payload's sum is wrong")
        return Refused(transfer_id, refusal)

    def give_up(self, transfer_id: int) -> None:
        """Stops waiting for a transfer's answer; does nothing if it has ended."""
        if transfer_id in self._open or transfer_id in self._gets:
            self._close(transfer_id)
            self._given_up.add(transfer_id)

    def receive(self, frame: Frame) -> SenderOutcome:
        """Returns the outcome that an answer means.

        Raises:
            ProtocolError: unexpected_frame, wrong_peer, unknown_transfer, wrong_progress or
                bad_payload_size. The caller closes the channel.
        """
        if isinstance(frame, ErrorFrame) and frame.transfer_id == CHANNEL:
            return Ended(refusal_of(frame))
        if not self._opened:
            return self._hello_ok(frame)
        if not isinstance(frame, PutOkFrame | CommitOkFrame | DataFrame | ErrorFrame):
            raise ProtocolError("unexpected_frame", f"{type(frame).__name__} from a receiver")
        if not CHANNEL < frame.transfer_id < self._next_transfer_id:
            raise ProtocolError("unknown_transfer", f"no transfer {frame.transfer_id} was sent")
        if isinstance(frame, DataFrame):
            return self._arriving(frame)
        if frame.transfer_id not in self._open and frame.transfer_id not in self._gets:
            return self._late(frame.transfer_id)
        if isinstance(frame, ErrorFrame):
            self._close(frame.transfer_id)
            return Refused(frame.transfer_id, refusal_of(frame))
        if frame.transfer_id in self._gets:
            raise ProtocolError("unexpected_frame", f"{type(frame).__name__} answers a GET")
        return self._moved(frame)

    def _late(self, transfer_id: int) -> Late:
        # Once each: otherwise a peer could repeat an answer forever and never count as silent.
        if transfer_id not in self._given_up:
            raise ProtocolError("unknown_transfer", f"{transfer_id} was answered before")
        self._given_up.remove(transfer_id)
        return Late(transfer_id)

    def _close(self, transfer_id: int) -> None:
        self._open.pop(transfer_id, None)
        self._gets.pop(transfer_id, None)

    def _arriving(self, frame: DataFrame) -> Arriving:
        # A reader takes its answers in turn, so DATA for a request that it gave up cannot come.
        if frame.transfer_id not in self._gets:
            raise ProtocolError("unexpected_frame", f"DATA for {frame.transfer_id}, not asked for")
        if frame.num_bytes != self._gets[frame.transfer_id]:
            message = f"{frame.num_bytes} bytes for {self._gets[frame.transfer_id]}"
            raise ProtocolError("bad_payload_size", message)
        return Arriving(frame.transfer_id)

    def _hello_ok(self, frame: Frame) -> Opened:
        if not isinstance(frame, HelloOkFrame):
            raise ProtocolError("unexpected_frame", f"{type(frame).__name__} before HELLO_OK")
        if (frame.worker_id, frame.incarnation) != self._peer:
            raise ProtocolError("wrong_peer", f"{frame.worker_id}/{frame.incarnation} answered")
        if frame.terms is not None:
            self.terms = frame.terms
        self._opened = True
        return Opened()

    def _moved(self, frame: PutOkFrame | CommitOkFrame) -> Moved:
        total = self._open[frame.transfer_id]
        is_put = isinstance(frame, PutOkFrame)
        if is_put != (total is not None):
            raise ProtocolError("unexpected_frame", f"{type(frame).__name__} answers another verb")
        complete = True
        if isinstance(frame, PutOkFrame) and total is not None:
            if frame.received_bytes > total:
                raise ProtocolError("wrong_progress", f"{frame.received_bytes} of {total} bytes")
            complete = frame.received_bytes == total
        if complete:
            self._close(frame.transfer_id)
        return Moved(frame.transfer_id, complete)

    def _new_transfer(self, num_bytes: int | None) -> int:
        transfer_id = self._next_transfer_id
        self._next_transfer_id += 1
        self._open[transfer_id] = num_bytes
        return transfer_id
