"""QUERY: asks other workers to compute next to their KV, for a thread that waits for the answers.

The engine's thread asks all questions, on one line per holder. It sends the questions of a layer
before it waits for the first answer. A line that died is opened once more: a question changes
nothing at the holder, so it may be asked twice. Tests: tests/contract/test_queries.py.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvmesh.core.clock import Clock
from kvmesh.core.details import ANSWER, ASK
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, RefusalReason
from kvmesh.policy.linear_time import LinearTime
from kvmesh.policy.query_cost import FIRST_SPEED
from kvmesh.transfer.channel import IPC, LOCAL, NIXL, SHM, TCP, kinds_to_ask
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.greeting import PeerKey, asker_machine
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.host import host_id
from kvmesh.transfer.meters import LinkKey, LinkMeters, TransferStatistics
from kvmesh.transfer.native import num_bytes_of
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.query_line import QueryLine, Question
from kvmesh.transfer.sockets import resolve_blocking, suit_path, tune
from kvmesh.transfer.tls import connect_tls_blocking
from kvmesh.transfer.wire import Wire

_ASKED_OVER = {LOCAL: SHM, IPC: SHM, NIXL: TCP}
"""Kinds that carry queries in place of others: operands and answers need our own connection."""

SHUN_S = 5.0
"""Seconds without questions to a lost holder: a question without an answer stalls the batch."""
BUSY_S = 0.5
"""Seconds without questions to a holder that refused one as busy."""
MAX_LINES = 64
"""Maximum number of lines that are kept, unless more have questions outstanding."""


class Work(NamedTuple):
    """Attention that is requested in one layer.

    Attributes:
        num_pairs: number of pairs of a query token and a prefix token.
        pair_units: cost of each pair, in units of `FIRST_SPEED`.
    """

    num_pairs: int
    pair_units: int

    @property
    def num_units(self) -> int:
        """Cost of all pairs, in units of `FIRST_SPEED`."""
        return self.num_pairs * self.pair_units


class Asker:
    """Lines to holders, opened when first used and kept.

    Attributes:
        asked: number of questions so far.
        lost: number of questions without an answer.
        sent_bytes: bytes of questions since start.
    """

    def __init__(
        self,
        identity: ChannelIdentity,
        options: SendOptions,
        clock: Clock,
        egress: Pacer | None = None,
    ) -> None:
        """Opens no line yet.

        Args:
            identity: this worker.
            options: kinds, checksum, timeouts and TLS of a sender.
            egress: budget of all bytes that leave this worker over TCP; None for no limit.
        """
        self._egress = egress
        self._meters = LinkMeters()
        self.layout = identity.layout
        self._identity = identity
        self._options = options
        self._clock = clock
        self._host_id = host_id()
        self._lines: dict[tuple[PeerKey, Endpoint], QueryLine] = {}
        self._speeds: dict[PeerKey, LinearTime] = {}
        self._mute: set[PeerKey] = set()
        self._shunned: dict[PeerKey, float] = {}
        # Held while the asking thread uses a line; `close` runs in another thread.
        self._busy = threading.Lock()
        self._closed = False
        self.asked = self.lost = self.sent_bytes = 0

    def answers(self, peer: PeerKey) -> bool:
        """Returns whether a holder supports our queries and was not lost or busy just now."""
        return peer not in self._mute and not self._is_shunned(peer)

    def speed(self, peer: PeerKey) -> LinearTime:
        """Returns the measured speed of a holder, or the default assumption."""
        return self._speeds.get(peer, FIRST_SPEED)

    def close(self) -> None:
        """Ends all lines; a waiting thread gets LostError. Blocks shortly; may be called again."""
        self._closed = True
        for line in list(self._lines.values()):
            line.cut()
        with self._busy:
            for line in self._lines.values():
                line.close()
            self._lines.clear()

    def send(self, holder: Holder, questions: Sequence[Question]) -> None:
        """Sends questions, on a new line if the present one is dead.

        Raises:
            RefusedError: the holder has another incarnation or layout.
            LostError: it cannot be reached.
        """
        with self._busy, self._shunning(holder.peer):
            line = self._line(holder)
            try:
                for question in questions:
                    self._ask(line, holder.peer, question)
                    self.asked += 1
            except LostError:
                self._again(holder, line, questions)

    def receive(self, holder: Holder, questions: Sequence[Question]) -> None:
        """Waits for the answers; a line that dies is opened once more.

        Raises:
            RefusedError: the holder refused one of them.
            LostError: the holder is gone, or a second line died.
        """
        with self._busy, self._shunning(holder.peer):
            line = self._lines.get((holder.peer, holder.data_endpoint))
            for question in questions:
                try:
                    if line is None or not line.is_open:
                        raise question.error or LostError("queries: the line was closed")
                    line.hear(question)
                except LostError:
                    self._again(holder, line, questions)
                    line = self._line(holder)
                    line.hear(question)

    def observe(
        self, peer: PeerKey, questions: Sequence[Question], work: Work, seconds: float
    ) -> None:
        """Records a measured exchange and its duration."""
        speed = self._speeds[peer] = self.speed(peer).with_sample(work.num_units, seconds)
        meter = self._meters.of(LinkKey(peer.worker_id, ANSWER, "received"))
        meter.frames += len(questions)
        meter.bytes += sum(num_bytes_of(question.into) for question in questions)
        meter.seconds += seconds
        meter.rtt_s = speed.call_s
        meter.pair_s = speed.unit_s * work.pair_units * self.layout.num_layers

    def statistics(self) -> TransferStatistics:
        """Returns totals of questions and answers by holder; callable from any thread."""
        return TransferStatistics(len(self._lines), dict(self._meters.links))

    def note_failure(self, peer: PeerKey, error: LostError | RefusedError) -> None:
        """Counts a question without an answer; after INVALID the holder is not asked again."""
        self.lost += 1
        reason = error.refusal.reason if isinstance(error, RefusedError) else None
        if reason is RefusalReason.INVALID:
            self._mute.add(peer)
        elif reason is RefusalReason.BUSY:
            self._shun(peer, BUSY_S)

    def now(self) -> float:
        """The clock's time, in seconds."""
        return self._clock.now()

    @contextlib.contextmanager
    def _shunning(self, peer: PeerKey) -> Iterator[None]:
        """Stops questions to a holder for `SHUN_S` if the line is lost inside the context."""
        try:
            yield
        except LostError:
            self._shun(peer, SHUN_S)
            raise

    def _shun(self, peer: PeerKey, seconds: float) -> None:
        now = self.now()
        self._shunned = {each: until for each, until in self._shunned.items() if now < until}
        self._shunned[peer] = max(self._shunned.get(peer, 0.0), now + seconds)

    def _is_shunned(self, peer: PeerKey) -> bool:
        return self.now() < self._shunned.get(peer, 0.0)

    def _again(self, holder: Holder, line: QueryLine | None, questions: Sequence[Question]) -> None:
        """Repeats unanswered questions on a new line, unless the holder was silent for too long."""
        self._lines.pop((holder.peer, holder.data_endpoint), None)
        if line is not None:
            line.close()
            if line.has_stalled:
                raise LostError("queries: the holder is silent or too slow")
        fresh = self._line(holder)
        for question in questions:
            if not question.is_answered:
                question.error = None
                self._ask(fresh, holder.peer, question)

    def _ask(self, line: QueryLine, peer: PeerKey, question: Question) -> None:
        line.ask(question)
        meter = self._meters.of(LinkKey(peer.worker_id, ASK, "sent"))
        meter.frames += 1
        meter.bytes += question.operands.nbytes
        self.sent_bytes += question.operands.nbytes

    def _line(self, holder: Holder) -> QueryLine:
        key = (holder.peer, holder.data_endpoint)
        line = self._lines.get(key)
        if self._closed:
            raise LostError("queries: closed by this side")
        if line is None or not line.is_open:
            if line is not None:
                line.close()
            line = self._lines[key] = self._open(holder)
        return line

    def _forget_unused(self, peer: PeerKey) -> None:
        """Closes lines to earlier incarnations of a holder, and the oldest beyond `MAX_LINES`.

        A restarted worker is a new peer, and this side learns that a line has ended only when it
        uses the line again.
        """
        surplus = len(self._lines) + 1 - MAX_LINES
        for key, line in list(self._lines.items()):
            is_earlier = key[0].worker_id == peer.worker_id and key[0] != peer
            # After a refusal, a line may have further questions outstanding that nobody waits for.
            if is_earlier or (surplus > 0 and not line.num_asked):
                surplus -= 1
                self._lines.pop(key).close()
                self._speeds.pop(key[0], None)
                self._mute.discard(key[0])

    def _open(self, holder: Holder) -> QueryLine:
        options = self._options
        if self._is_shunned(holder.peer):  # other sequences of the step need not wait for it again
            raise LostError("queries: the holder was lost just now")
        self._forget_unused(holder.peer)
        kinds = kinds_to_ask(options.kinds, _ASKED_OVER, self._host_id, holder.host_route)
        failure = LostError(f"no channel of {', '.join(options.kinds)} leads to the holder")
        for kind in kinds:
            machine = asker_machine(self._identity, holder.peer, kind, 0, options.checksum)
            with contextlib.ExitStack() as on_failure:
                try:
                    wire = self._connect(holder, kind)
                    on_failure.callback(wire.close)
                    pacer = self._egress if kind == TCP else None
                    line = QueryLine(wire, machine, options.stall_timeout_s, pacer)
                    line.greet()
                except LostError as error:
                    failure = error
                    continue
                except OSError as error:  # a socket that died while it was set up
                    failure = LostError(f"queries: {error}")
                    continue
                on_failure.pop_all()
                return line
        raise failure

    def _connect(self, holder: Holder, kind: str) -> Wire:
        try:
            if kind == SHM:
                assert holder.host_route is not None, "usable on the same host only"
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                address: str | tuple[str, int] = holder.host_route.socket_path
                return _connected(sock, address, self._options.connect_timeout_s)
            endpoint = holder.data_endpoint
            timeout_s = self._options.connect_timeout_s
            family, kind_, protocol, _, where = resolve_blocking(endpoint, timeout_s)
            sock = _connected(socket.socket(family, kind_, protocol), where, timeout_s)
        except OSError as error:
            raise LostError(f"queries: {error}") from error
        if self._options.tls is None:
            return sock
        return connect_tls_blocking(sock, self._options.tls, endpoint.host)


def _connected(
    sock: socket.socket, address: str | tuple[object, ...], timeout_s: float
) -> socket.socket:
    try:
        tune(sock)
        sock.settimeout(timeout_s)
        sock.connect(address)
        suit_path(sock)
    except OSError:
        sock.close()
        raise
    return sock
