"""What is measured and logged about one generation.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvmesh.console.request_log import RequestLog
from kvmesh.core.errors import KvMeshError
from kvmesh.core.types import FINISH_WORDS, FinishReason, TokenLogprobs
from kvmesh.core.values import quick
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, is_tracing
from services.gateway.admission import Ticket
from services.gateway.errors import StageRefusedError
from services.gateway.mesh import GenerationRequest, Placed
from services.gateway.metrics import GatewayMetrics

log = event_logger(__name__)

FLUSH_AFTER = 16
"""Pieces of a stream that are counted together."""


@quick
@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of one choice.

    Attributes:
        text: safe to send; may be empty.
        token_ids: the tokens of this piece.
        logprobs: one per token when asked for.
        finish_reason: set on the last piece.
        prompt_logprobs: on the first piece when asked for, of all prompt tokens but the first.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    cached_tokens: int
    placed: Placed
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class RequestRecord:
    """Measures one generation, writes its log line, keeps its place in the console's log.

    Args:
        ticket: what the tokens are charged to, as they come: who leaves before the end pays too.
        arrived_at: on the loop's clock.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        request: GenerationRequest,
        shown: RequestLog,
        ticket: Ticket | None,
        arrived_at: float,
    ) -> None:
        self._metrics = metrics
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

    def add(self, delta: TextDelta, num_told: int = 0) -> None:
        """Counts a piece.

        Args:
            num_told: of its tokens, those that were counted when they came.
        """
        count = len(delta.token_ids) - num_told
        if self._last_at is None:
            self.first(count, self._loop.time())
        elif count or not num_told:
            self.tokens(count, self._loop.time())
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason

    def first(self, count: int, now: float) -> None:
        """Counts the tokens of the first piece; as `tokens`."""
        self._ttft_s = now - self._started_at
        self._metrics.ttft_s.observe(self._ttft_s)
        self._last_at = now
        self._count(count)

    def tokens(self, count: int, now: float) -> None:
        """Counts tokens after the first piece.

        Args:
            now: when they came, on the loop's clock.
        """
        assert self._last_at is not None, "a first piece came"
        self._gaps.append(now - self._last_at)
        self._last_at = now
        self._count(count)
        if len(self._gaps) >= FLUSH_AFTER:
            self._flush()

    def _count(self, count: int) -> None:
        self._num_uncounted += count
        if self._charge is not None:
            self._charge(count)

    def _flush(self) -> None:
        """Lets metrics and console show what was gathered."""
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
        if is_tracing():
            span.set(finish_reason=self._finish.value, completion_tokens=self._num_tokens)

    def close(self, trace_id: str) -> None:
        """Writes the log line of the request."""
        self._flush()
        elapsed_s = self._loop.time() - self._started_at
        if self._finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._metrics.e2e_s.observe(elapsed_s)
            self._metrics.prompt_tokens.inc(len(self._request.prompt_ids))
        self._metrics.finished(self._finish)
        self._shown.end(
            self._request.request_id, self._loop.time(), FINISH_WORDS[self._finish], self._error
        )
        if log.tells_info:
            self._log(trace_id, elapsed_s)

    def _log(self, trace_id: str, elapsed_s: float) -> None:
        # Not from the last piece: tokens that went by a lane left none, and neither did what was
        # cancelled before it.
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
