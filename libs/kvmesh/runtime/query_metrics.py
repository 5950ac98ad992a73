"""Prometheus metrics of attention over KV of other workers.

Tests: tests/integration/test_prefix_queries.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class _AskerCollector(Collector):
    """Reads an asker's counters at scrape time."""

    def __init__(self, counts: Callable[[], tuple[int, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        asked, lost = self._counts()
        yield CounterMetricFamily("kvmesh_queries_asked", "Questions asked", asked)
        yield CounterMetricFamily("kvmesh_queries_lost", "Without an answer", lost)


class QueryMetrics:
    """Metrics of both sides of queries."""

    def __init__(self, registry: CollectorRegistry = prometheus_client.REGISTRY) -> None:
        self.read_blocks_total = 0
        """Number of blocks that others' queries have read here, once for all layers of a chunk."""
        self._register: Callable[[Collector], None] = registry.register
        self.answers = Counter(
            "kvmesh_queries_answered",
            "Questions of other workers by outcome",
            ["outcome", "reason"],
            registry=registry,
        )
        self.prefixes = Counter(
            "kvmesh_prefix_queries",
            "Prompts whose prefix another worker held, by what was done",
            ["outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "kvmesh_prefix_queried_tokens",
            "Prompt tokens whose KV stayed with another worker",
            registry=registry,
        )

    def watch(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Exports the number of queries sent, and of those without an answer."""
        self._register(_AskerCollector(counts))
