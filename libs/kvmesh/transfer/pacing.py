"""Budgets of a link: bytes per second, the order of senders, and bytes in flight.

Pure except for `Pacer`, which waits on an event loop. Tests: tests/unit/transfer/test_pacing.py.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections import deque
from collections.abc import Callable

from kvmesh.core.clock import Clock

_BURST_S = 0.02
_MIN_PIECE_BYTES = 16 << 10
_MAX_PIECE_BYTES = 4 << 20
_LATER_PIECES = 4

LEAST_SHARE = 0.1
"""Fraction of earlier shares' bytes that a waiting share may send: it is late, not starved."""


class Share(enum.IntEnum):
    """Purpose of bytes that leave, in order of priority: the most urgent comes first."""

    HANDOFF = 0
    """A first token or a step waits: handed-over KV, queries and their answers."""
    READ = 1
    """A prompt waits for a prefix, which the reader could compute instead."""
    COPY = 2
    """A copy planned ahead; nothing waits for it."""


class TokenBucket:
    """A token bucket: keeps a byte rate over any span longer than a burst."""

    def __init__(self, bytes_per_s: float, burst_bytes: int) -> None:
        assert bytes_per_s > 0, f"{bytes_per_s} bytes/s"
        assert burst_bytes > 0, f"burst of {burst_bytes} bytes"
        self._rate = bytes_per_s
        self._burst_s = burst_bytes / bytes_per_s
        self._paid_until = float("-inf")

    def delay(self, num_bytes: int, now: float) -> float:
        """Returns the seconds from `now` until `num_bytes` could be sent if nobody takes any."""
        return max(0.0, self._paid_after(num_bytes, now) - now)

    def take(self, num_bytes: int, now: float) -> float:
        """Takes the bytes; returns the seconds from `now` until they may be sent."""
        self._paid_until = self._paid_after(num_bytes, now)
        return max(0.0, self._paid_until - now)

    def _paid_after(self, num_bytes: int, now: float) -> float:
        return max(self._paid_until, now - self._burst_s) + num_bytes / self._rate


class Ticket:
    """A sender's place in the queue for a budget."""

    __slots__ = ("go", "num_bytes", "share")

    def __init__(self, num_bytes: int, share: Share, go: Callable[[], None]) -> None:
        """Calls `go` once, when the bytes may be sent."""
        self.num_bytes, self.share, self.go = num_bytes, share, go


class TurnQueue:
    """The order of waiting senders: shares by priority, and first come, first served within one.

    A waiting share accrues `LEAST_SHARE` of the bytes sent before it. Once that credit covers the
    bytes of its oldest ticket, that ticket goes first. A share without tickets has no credit.
    """

    def __init__(self) -> None:
        self._waiting: dict[Share, deque[Ticket]] = {share: deque() for share in Share}
        self._owed = dict.fromkeys(Share, 0.0)

    def join(self, ticket: Ticket) -> None:
        """Adds a waiting ticket."""
        self._waiting[ticket.share].append(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Removes a waiting ticket; does nothing if it went already."""
        line = self._waiting[ticket.share]
        if ticket in line:
            line.remove(ticket)
            self._settle(ticket.share)

    def first(self) -> Ticket | None:
        """Returns the ticket whose turn is next; None if no ticket waits."""
        lines = [line for line in self._waiting.values() if line]
        for line in lines[1:]:
            if self._owed[line[0].share] >= line[0].num_bytes:
                return line[0]
        return lines[0][0] if lines else None

    def go(self) -> Ticket:
        """Removes and returns the ticket whose turn it is."""
        ticket = self.first()
        assert ticket is not None, "somebody waits"
        self._waiting[ticket.share].popleft()
        self._owed[ticket.share] = max(0.0, self._owed[ticket.share] - ticket.num_bytes)
        for share, line in self._waiting.items():
            if line and share > ticket.share:
                self._owed[share] += LEAST_SHARE * ticket.num_bytes
        self._settle(ticket.share)
        return ticket

    def _settle(self, share: Share) -> None:
        if not self._waiting[share]:
            self._owed[share] = 0.0


class CreditWindow:
    """Maximum number of bytes in flight without an answer; 0 is no limit.

    One piece passes whatever its size, so a window smaller than a piece still makes progress.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self.unanswered_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether `num_bytes` more may be sent."""
        return (
            self.unanswered_bytes == 0
            or self._window_bytes == 0
            or self.unanswered_bytes + num_bytes <= self._window_bytes
        )

    def spend(self, num_bytes: int) -> None:
        """Records bytes that are sent."""
        self.unanswered_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Records bytes that were answered."""
        assert num_bytes <= self.unanswered_bytes, "more was answered than sent"
        self.unanswered_bytes -= num_bytes


class Pacer:
    """Keeps the senders of one link within its budget, in the order of their shares.

    All methods except `delay` are called on one event loop.

    Attributes:
        piece_bytes: maximum bytes that a handoff should take at once, so that no wait is long.
        handed_bytes: bytes granted to handoffs that asked for a turn, since the start.
    """

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self.piece_bytes = int(min(max(bytes_per_s * _BURST_S, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES))
        self.handed_bytes = 0
        self._bucket = TokenBucket(bytes_per_s, self.piece_bytes)
        self._clock = clock
        self._lock = threading.Lock()
        self._queue = TurnQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_s = 0.0
        self._idle_since: float | None = clock.now()

    def piece(self, share: Share) -> int:
        """Returns the maximum bytes that a sender should take at once.

        It is smaller for shares that may get only the least share: many of their senders take
        turns, and a peer that receives nothing for too long takes its holder for lost.
        """
        whole = self.piece_bytes
        return whole if share is Share.HANDOFF else max(whole // _LATER_PIECES, _MIN_PIECE_BYTES)

    @property
    def is_idle(self) -> bool:
        """Whether no sender waits."""
        return self._queue.first() is None

    @property
    def idle_s(self) -> float:
        """Seconds so far without a waiting sender: slowness then is not caused by the budget."""
        since = self._idle_since
        return self._idle_s + (0.0 if since is None else self._clock.now() - since)

    def delay(self, num_bytes: int) -> float:
        """Takes bytes before all waiting senders; returns the seconds to wait before sending them.

        For a thread that sends little, and nothing more before it has an answer. Thread-safe.
        """
        with self._lock:
            return self._bucket.take(num_bytes, self._clock.now())

    def ask(self, num_bytes: int, share: Share, go: Callable[[], None]) -> Ticket:
        """Queues for permission to send; `go` is called when it is granted, possibly at once.

        Args:
            num_bytes: about one `piece` at most; more delays other senders for long.
        """
        ticket = Ticket(num_bytes, share, go)
        self._queue.join(ticket)
        self._serve()
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Removes a ticket from the queue. A granted ticket has spent its bytes."""
        self._queue.leave(ticket)
        self._serve()

    def _serve(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (ticket := self._queue.first()) is not None:
            with self._lock:
                now = self._clock.now()
                # A bucket never holds more than a burst: larger pieces go on credit, and later ones
                # wait.
                wait_s = self._bucket.delay(min(ticket.num_bytes, self.piece_bytes), now)
                if wait_s == 0:
                    self._bucket.take(ticket.num_bytes, now)
            if wait_s > 0:
                self._idle_s, self._idle_since = self.idle_s, None
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._serve)
                return
            if ticket.share is Share.HANDOFF:
                self.handed_bytes += ticket.num_bytes
            self._queue.go().go()
        if self._idle_since is None:
            self._idle_since = self._clock.now()
