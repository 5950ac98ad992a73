"""Measures how long a request waits, prefills and decodes.

Tests: tests/integration/test_gateway_http.py.
"""

from __future__ import annotations

from services.gateway.metrics import ModelMetrics


class Phases:
    """Times one request. Its first placement ends the wait; later moves count as decode time.

    Args:
        now: when the request arrived; all times are seconds on the loop's clock.
    """

    def __init__(self, metrics: ModelMetrics, now: float) -> None:
        self._metrics = metrics
        self._arrived_at = now
        self._accepted_at: float | None = None
        self._first_at: float | None = None

    def accepted(self, now: float) -> None:
        """Notes that a prefill worker took the request."""
        if self._accepted_at is None:
            self._accepted_at = now
            self._metrics.queue_s.observe(now - self._arrived_at)

    def token(self, now: float) -> None:
        """Notes that a token arrived."""
        if self._first_at is None and self._accepted_at is not None:
            self._first_at = now
            self._metrics.prefill_s.observe(now - self._accepted_at)

    def finished(self, now: float) -> None:
        """Notes that the last token arrived."""
        if self._accepted_at is not None and self._first_at is not None:
            self._metrics.decode_s.observe(now - self._first_at)
            self._metrics.inference_s.observe(now - self._accepted_at)
