"""One request's bookkeeping: waiting counts, connections, metrics, spans, the console's log.

All times are on the loop's clock. Tests: tests/integration/test_gateway_http.py,
tests/integration/test_gateway_moves.py, tests/e2e/test_trace.py.
"""

from __future__ import annotations

from kvmesh.console.request_log import Moment
from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FinishReason, Refusal, RoutePlan, WorkerId
from kvmesh.core.values import changed
from kvmesh.policy.groups import GroupKey
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, start_span
from services.gateway.errors import Stage
from services.gateway.request.actions import Kind, Move, Taken
from services.gateway.request.lanes import Lane, Waiting
from services.gateway.request.mesh import GenerationRequest, Mesh
from services.gateway.request.phases import Phases
from services.gateway.request.record import RequestRecord
from services.gateway.tenants.admission import Ticket
from services.gateway.wire.worker_events import FirstToken

log = event_logger(__name__)

_ASK_SPANS = {
    Kind.RESERVE: "gateway.reserve",
    Kind.OFFER: "gateway.offer",
    Kind.START: "gateway.offer",
}


class Ledger:
    """Bookkeeping of one request from its arrival to its end.

    Args:
        request: the request as it arrived.
        ticket: the tenant's ticket, which is charged for the tokens.
        now: when the request arrived.

    Attributes:
        request: the same request, with this request's span as the parent of later spans.
        cached_tokens: prompt tokens whose KV was cached; None before the first token.
        lane: the lane of the latest search.
        waiting: the waiting count that includes the latest search.
    """

    lane: Lane
    waiting: Waiting

    def __init__(
        self, mesh: Mesh, request: GenerationRequest, ticket: Ticket | None, now: float
    ) -> None:
        self._mesh = mesh
        self._span = start_span(
            "gateway.request",
            request.traceparent,
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
        )
        self._is_traced = self._span.is_kept
        traceparent = self._span.traceparent
        if traceparent != request.traceparent:
            request = changed(request, traceparent=traceparent)
        self.request = request
        self.cached_tokens: int | None = None
        self._record = RequestRecord(mesh.of_model, request, mesh.log, ticket, now)
        self._trace = mesh.log.trace(request.request_id)
        self._phases = Phases(mesh.of_model, now)
        self._spans: dict[str, Span] = {}
        self._is_searching = False
        self._connected: WorkerId | None = None
        self._num_rejected = 0
        self._taken_at = 0.0
        self._is_open = True
        mesh.metrics.requests_open.inc()
        # Called for every token, so looked up once.
        self.tokens = self._record.tokens

    # --- the search for workers ---

    def searches(self, group: GroupKey) -> None:
        """Notes that a search for a group's workers begins."""
        assert not self._is_searching, "one search at a time"
        self._is_searching = True
        self.lane = self._mesh.lanes.of(group)
        self._record.group = self._mesh.metrics.of_group(group)
        self.lane.crowd.enter(self.request.tenant.name)
        self.waiting = self._mesh.lanes.enter(self.request.scenario)

    def routed(self, plan: RoutePlan, now: float) -> None:
        """Notes a plan from the scheduler."""
        self._trace.note(Moment.ROUTED, now, text=f"{plan.policy}: {plan.reason}")

    def asks(self, kind: Kind) -> str:
        """Notes a question to a worker; returns the traceparent to send with it."""
        if not self._is_traced:
            return self.request.traceparent
        return self._span_of(_ASK_SPANS[kind]).traceparent

    def holds(self, worker_id: WorkerId, now: float) -> None:
        """Notes that a worker reserved blocks."""
        self._trace.note(Moment.RESERVED, now, worker_id)
        self._end_span("gateway.reserve", worker=worker_id)

    def refused(
        self, stage: Stage, refusal: Refusal, worker_id: WorkerId | None, now: float
    ) -> None:
        """Notes a refusal. Without `worker_id` it came from the scheduler or this gateway."""
        mesh, reason = self._mesh, refusal.reason.value
        mesh.metrics.refused(reason, stage.value)
        if self._record.group is not None:
            self._record.group.refused(reason)
        self._trace.note(Moment.REFUSED, now, worker_id, f"{stage.value}: {reason}")
        if worker_id is None:
            return
        if stage is Stage.PREFILL:
            self._num_rejected += 1
            mesh.connections.rejected(worker_id)
        for span in self._spans.values():
            span.event("refused", worker=worker_id, reason=reason)

    def taken(self, taken: Taken, now: float) -> None:
        """Notes that workers accepted the request."""
        mesh, prefill = self._mesh, taken.prefill_worker
        self._end_search(now, placed=True)
        self._end_span("gateway.offer", worker=prefill)
        mesh.of_model.prefill_offers.observe(self._num_rejected + 1)
        mesh.connections.accepted(prefill)
        self._connected = prefill
        self._taken_at = now
        self._phases.accepted(now)
        self._trace.placed(now, taken.placement, prefill, taken.decode_worker)
        if self._is_traced:
            self._span_of("gateway.first_token")

    # --- its tokens ---

    def first(self, first: FirstToken, num_sent: int, worker_id: WorkerId, now: float) -> None:
        """Notes the first token of an attempt, whose worker was sent `num_sent` tokens."""
        if self.cached_tokens is None:
            self.cached_tokens = self._trace.cached_tokens = first.cached_tokens
        self.lane.prefill_times.note(num_sent, now - self._taken_at)
        self._trace.note(Moment.FIRST_TOKEN, now, worker_id)
        self._phases.token(now)
        self._end_span("gateway.first_token", cached_tokens=first.cached_tokens)
        if self._is_traced and first.finish_reason is None:
            self._span_of("gateway.decode")

    def decoding(self, worker_id: WorkerId, now: float) -> None:
        """Notes that the decode worker has all of the KV."""
        self._trace.note(Moment.HANDED_OFF, now, worker_id)

    def finished(self, now: float) -> None:
        """Notes that the workers sent the last token."""
        self._phases.finished(now)

    # --- ends ---

    def lost(self, move: Move, num_tokens: int, now: float) -> None:
        """Notes that a worker lost the request after `num_tokens` tokens."""
        self._mesh.metrics.moved(move.reason)
        self._trace.note(Moment.LOST, now, move.worker_id, move.reason)
        log.warning(
            "request_lost_by_worker",
            request_id=self.request.request_id,
            worker=move.worker_id,
            reason=move.reason,
            error=move.text,
            num_tokens=num_tokens,
        )
        self._end_attempt(num_tokens, now)

    def failed(self, error: KvMeshError) -> None:
        """Notes the error that ends the request."""
        self._record.failed(error)

    def ends(self, finish: FinishReason) -> None:
        """Notes that the last piece went to the client."""
        self._record.ends(finish)

    def close(self, num_tokens: int, now: float) -> None:
        """Ends the bookkeeping after `num_tokens` tokens, for every outcome. Repeatable."""
        if not self._is_open:
            return
        self._is_open = False
        self._end_attempt(num_tokens, now)
        self._record.annotate(self._span)
        self._record.close(self._span.trace_id)
        self._span.end()
        self._mesh.metrics.requests_open.dec()

    def _end_attempt(self, num_tokens: int, now: float) -> None:
        self._num_rejected = 0
        self._end_search(now, placed=False)
        if self._connected is not None:
            self._mesh.connections.ended(self._connected)
            self._connected = None
        self._end_span("gateway.decode", num_tokens=num_tokens)
        for name in tuple(self._spans):
            self._end_span(name)

    def _end_search(self, now: float, *, placed: bool) -> None:
        if self._is_searching:
            self._is_searching = False
            self._mesh.lanes.leave(self.request.scenario)
            self.lane.crowd.leave(self.request.tenant.name, now, placed=placed)

    def _span_of(self, name: str) -> Span:
        """The open span of this name, started if needed. It may last over several questions."""
        if name not in self._spans:
            self._spans[name] = start_span(name, self.request.traceparent)
        return self._spans[name]

    def _end_span(self, name: str, **attributes: str | int) -> None:
        span = self._spans.pop(name, None)
        if span is not None:
            span.set(**attributes)
            span.end()
