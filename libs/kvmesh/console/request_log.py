"""History of the open requests and of the last ones that ended.

Bookkeeping of one gateway; times come from the caller. Tests:
tests/unit/console/test_request_log.py.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.core.types import Placement, RequestId, WorkerId

CAPACITY = 512
"""Maximum number of ended requests that are remembered."""

MAX_EVENTS = 64
"""Maximum number of events kept per request: one refused for seconds has very many."""


class Moment(enum.Enum):
    """Events of a request."""

    __hash__ = object.__hash__  # that of `Enum` is Python code and four times as slow

    ROUTED = "routed"
    RESERVED = "reserved"
    REFUSED = "refused"
    ACCEPTED = "accepted"
    FIRST_TOKEN = "first_token"
    HANDED_OFF = "handed_off"
    LOST = "lost"


class Stage(enum.Enum):
    """The present stage of a request."""

    WAITING = "waiting"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"
    ENDED = "ended"


_NEXT = {
    Moment.ACCEPTED: Stage.PREFILL,
    Moment.FIRST_TOKEN: Stage.HANDOFF,
    Moment.HANDED_OFF: Stage.DECODE,
    Moment.LOST: Stage.WAITING,
}


_REPEATED = frozenset({Moment.ROUTED, Moment.RESERVED, Moment.REFUSED})


class RequestEvent(NamedTuple):
    """One event of a request.

    Attributes:
        at_s: time on the log's clock.
        worker: the worker concerned; empty if there is none.
        text: reason or decision.
    """

    at_s: float
    moment: Moment
    worker: WorkerId
    text: str


@dataclass(slots=True)
class RequestTrace:
    """One request's history.

    Attributes:
        ended_at: None while it runs.
        num_refusals: number of all refusals, including those whose event was not kept.
        num_moves: number of times that a worker lost it.
        finish: OpenAI's word for the end, or `cancelled` or `error`; empty while it runs.
    """

    request_id: RequestId
    arrived_at: float
    prompt_tokens: int
    events: list[RequestEvent] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    placement: Placement = Placement.AUTO
    prefill_worker: WorkerId = WorkerId("")
    decode_worker: WorkerId = WorkerId("")
    cached_tokens: int = 0
    output_tokens: int = 0
    num_refusals: int = 0
    num_moves: int = 0
    ended_at: float | None = None
    finish: str = ""
    error: str = ""

    def note(
        self, moment: Moment, at_s: float, worker: WorkerId | None = None, text: str = ""
    ) -> None:
        """Adds an event. Events that a search may repeat are kept only up to a limit."""
        self.stage = _NEXT.get(moment, self.stage)
        if moment is Moment.REFUSED:
            self.num_refusals += 1
        elif moment is Moment.LOST:
            self.num_moves += 1
        if len(self.events) < MAX_EVENTS or moment not in _REPEATED:
            self.events.append(RequestEvent(at_s, moment, worker or WorkerId(""), text))

    def placed(
        self, at_s: float, placement: Placement, prefill: WorkerId, decode: WorkerId
    ) -> None:
        """Notes that a prefill worker accepted it for a decode worker with a reservation."""
        self.placement, self.prefill_worker, self.decode_worker = placement, prefill, decode
        self.note(Moment.ACCEPTED, at_s, prefill)

    def moment(self, moment: Moment) -> float | None:
        """The time of the first event of a kind; None without one."""
        return next((event.at_s for event in self.events if event.moment is moment), None)


class RequestLog:
    """All open requests and the last ones that ended.

    Args:
        unix_offset_s: offset from the log's clock to seconds since 1970.
        capacity: maximum number of ended requests that are remembered.
    """

    def __init__(self, unix_offset_s: float = 0.0, capacity: int = CAPACITY) -> None:
        self.unix_offset_s = unix_offset_s
        self._capacity = capacity
        self._open: dict[RequestId, RequestTrace] = {}
        self._ended: OrderedDict[RequestId, RequestTrace] = OrderedDict()
        self.arrived_total = 0
        self.ended_total = 0

    def open(self, request_id: RequestId, prompt_tokens: int, now: float) -> RequestTrace:
        """Adds a request that arrived."""
        trace = RequestTrace(request_id, now, prompt_tokens)
        self._open[request_id] = trace
        self.arrived_total += 1
        return trace

    def trace(self, request_id: RequestId) -> RequestTrace:
        """The trace of an open request; for an unknown request, a trace that is not kept."""
        return self._open.get(request_id) or RequestTrace(request_id, 0.0, 0)

    def end(self, request_id: RequestId, now: float, finish: str, error: str = "") -> None:
        """Ends a request. Does nothing if it is not open."""
        trace = self._open.pop(request_id, None)
        if trace is None:
            return
        trace.stage, trace.ended_at, trace.finish, trace.error = Stage.ENDED, now, finish, error
        self.ended_total += 1
        self._ended[request_id] = trace
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    @property
    def num_open(self) -> int:
        """Number of requests that run now."""
        return len(self._open)

    def running(self) -> Iterator[RequestTrace]:
        """The running requests, oldest first."""
        return iter(self._open.values())

    def latest(self) -> Iterator[RequestTrace]:
        """The ended requests, last first."""
        return reversed(self._ended.values())

    def find(self, name: str) -> RequestTrace | None:
        """A request by its id, or the latest request whose id begins with the client's id."""
        exact = self._open.get(RequestId(name)) or self._ended.get(RequestId(name))
        if exact is not None or not name:
            return exact
        traces = (*reversed(self._open.values()), *self.latest())
        return next((each for each in traces if each.request_id.startswith(f"{name}-")), None)
