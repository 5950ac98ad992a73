"""Prometheus metrics of the tiers below a worker's pool. Tests: tests/integration/test_tiers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.kv.tiers import TierStatistics
from kvmesh.runtime.prefetches import Prefetches


class TierCollector(Collector):
    """Reads the tiers' counters at scrape time."""

    def __init__(
        self, statistics: Callable[[], Sequence[TierStatistics]], prefetches: Prefetches | None
    ) -> None:
        self._statistics = statistics
        self._prefetches = prefetches

    def collect(self) -> Iterator[Metric]:
        """The metrics, most with one value per tier."""
        begun = 0 if self._prefetches is None else self._prefetches.begun_total
        yield CounterMetricFamily("kvmesh_tier_prefetches", "Prompts brought up ahead", begun)
        now = self._statistics()
        gauges = {
            "kvmesh_tier_places": ("Blocks that a tier has room for", "num_places"),
            "kvmesh_tier_blocks": ("Blocks that it keeps", "num_kept"),
        }
        counters = {
            "kvmesh_tier_stored_blocks": ("Blocks copied down", "stored_total"),
            "kvmesh_tier_loaded_blocks": ("Blocks brought up", "loaded_total"),
            "kvmesh_tier_evicted_blocks": ("Blocks that had to go for others", "evicted_total"),
            "kvmesh_tier_lost_blocks": ("Blocks that could not be read again", "lost_total"),
        }
        for name, (text, field) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["tier"])
            for each in now:
                gauge.add_metric([each.name], getattr(each, field))
            yield gauge
        for name, (text, field) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["tier"])
            for each in now:
                counter.add_metric([each.name], getattr(each, field))
            yield counter
