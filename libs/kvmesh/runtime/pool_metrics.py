"""Prometheus metrics of the KV that workers hold for each other.

Tests: tests/integration/test_prefix_fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.kv.read_leases import ReadLeaseStatistics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class _LeaseCollector(Collector):
    """Reads the table of leases at scrape time."""

    def __init__(self, statistics: Callable[[], ReadLeaseStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        now = self._statistics()
        yield GaugeMetricFamily("kvmesh_pool_leases", "Leases that others read by", now.num_open)
        yield GaugeMetricFamily("kvmesh_pool_leased_blocks", "Blocks in them", now.num_blocks)
        yield CounterMetricFamily("kvmesh_pool_leases_opened", "Leases given", now.opened_total)
        yield CounterMetricFamily("kvmesh_pool_leases_expired", "Ran out", now.expired_total)
        yield CounterMetricFamily(
            "kvmesh_pool_refusals", "Leases and reads refused", now.refused_total
        )


class PoolMetrics:
    """Metrics of both sides of a prefix fetch."""

    def __init__(self, registry: CollectorRegistry = prometheus_client.REGISTRY) -> None:
        self._registry = registry
        self.fetches = Counter(
            "kvmesh_prefix_fetches", "Fetches by outcome", ["outcome", "reason"], registry=registry
        )
        self.fetched_tokens = Counter(
            "kvmesh_prefix_fetched_tokens",
            "Prompt tokens whose KV came from another worker",
            registry=registry,
        )
        self.fetch_seconds = Histogram(
            "kvmesh_prefix_fetch_seconds",
            "Duration of a fetch, lease included",
            ["outcome"],
            buckets=_SECONDS,
            registry=registry,
        )

    def watch_leases(self, statistics: Callable[[], ReadLeaseStatistics]) -> None:
        """Exports the statistics of the holder's lease table."""
        self._registry.register(_LeaseCollector(statistics))
