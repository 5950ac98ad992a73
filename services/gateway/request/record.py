"""One generation's metrics, its log line and its row in the console's log.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.console.request_log import RequestLog
from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FINISH_WORDS, FinishReason
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span
from services.gateway.errors import StageRefusedError
from services.gateway.group_metrics import GroupMetrics
from services.gateway.metrics import ModelMetrics
from services.gateway.request.mesh import GenerationRequest
from services.gateway.tenants.admission import Ticket

log = event_logger(__name__)

FLUSH_AFTER = 16
"""Number of gaps between a stream's pieces after which its metrics are updated together."""


class RequestRecord:
    """Measures one generation and logs it.

    Args:
        ticket: charged for each piece's tokens, so a client that leaves early pays for its part.
        arrived_at: when the request arrived, on the loop's clock.

    Attributes:
        group: metrics of the group that it searches or has; None before its first search.
    """

    def __init__(
        self,
        metrics: ModelMetrics,
        request: GenerationRequest,
        shown: RequestLog,
        ticket: Ticket | None,
        arrived_at: float,
    ) -> None:
        self._metrics = metrics
        self.group: GroupMetrics | None = None
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._started_at = arrived_at
        self._last_at: float | None = None
        self._ttft_s = 0.0
        self._num_tokens = 0
        self._num_uncounted = 0
        self._gaps: list[float] = []
        self._finish = FinishReason.CANCELLED
        self._error = ""
        self._charge = None if ticket is None else ticket.charge
        self._shown = shown
        self._trace = shown.open(request.request_id, len(request.prompt_ids), self._started_at)

    def tokens(self, count: int, now: float) -> None:
        """Counts the tokens of a piece.

        Args:
            now: when they arrived, on the loop's clock.
        """
        if self._last_at is None:
            self._ttft_s = now - self._started_at
            self._metrics.ttft_s.observe(self._ttft_s)
            if self.group is not None:
                self.group.ttft_s.observe(self._ttft_s)
        else:
            self._gaps.append(now - self._last_at)
        self._last_at = now
        self._num_uncounted += count
        if self._charge is not None:
            self._charge(count)
        if len(self._gaps) >= FLUSH_AFTER:
            self._flush()

    def ends(self, finish: FinishReason) -> None:
        """Notes the finish reason, with the last piece."""
        self._finish = finish

    def _flush(self) -> None:
        """Adds the gathered tokens and gaps to the metrics and the console."""
        if not (self._num_uncounted or self._gaps):
            return
        self._metrics.itl_s.observe_all(self._gaps)
        self._gaps.clear()
        self._metrics.generation_tokens.inc(self._num_uncounted)
        self._num_tokens += self._num_uncounted
        self._num_uncounted = 0
        self._trace.output_tokens = self._num_tokens

    def failed(self, error: KvMeshError) -> None:
        """Notes the error that ended it."""
        self._finish = FinishReason.ERROR
        label = f"{error.label}: " if isinstance(error, StageRefusedError) else ""
        self._error = f"{label}{error}"

    def annotate(self, span: Span) -> None:
        """Adds the result to the request's span."""
        self._flush()
        if span.is_kept:
            span.set(finish_reason=self._finish.value, completion_tokens=self._num_tokens)

    def close(self, trace_id: str) -> None:
        """Counts the end of the request, and logs it once the answer has been sent."""
        self._flush()
        elapsed_s = self._loop.time() - self._started_at
        if self._finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.e2e_s.observe(elapsed_s)
            self._metrics.prompt_tokens.inc(len(self._request.prompt_ids))
        self._metrics.finished(self._finish)
        if self.group is not None:
            decode_s = (self._last_at or 0.0) - self._started_at - self._ttft_s
            self.group.ended(self._finish, decode_s, self._num_tokens)
        self._shown.end(
            self._request.request_id, self._loop.time(), FINISH_WORDS[self._finish], self._error
        )
        if log.tells_info:
            self._loop.call_soon(self._log, trace_id, elapsed_s)

    def _log(self, trace_id: str, elapsed_s: float) -> None:
        # From the trace and not from the last piece: a cancelled request has no last piece.
        trace = self._trace
        log.info(
            "request_finished",
            request_id=self._request.request_id,
            trace_id=trace_id,
            finish_reason=self._finish.value,
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=trace.cached_tokens,
            ttft_ms=round(self._ttft_s * 1000, 1),
            elapsed_ms=round(elapsed_s * 1000, 1),
            placement=trace.placement.value if trace.prefill_worker else "",
            prefill_worker=trace.prefill_worker,
            decode_worker=trace.decode_worker,
            error=self._error,
        )
