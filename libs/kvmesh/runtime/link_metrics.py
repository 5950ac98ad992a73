"""Prometheus series of the data plane's links. Tests: tests/unit/docs/test_metrics.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.transfer.meters import LinkMeter, TransferStatistics

_COUNTERS: dict[str, tuple[str, Callable[[LinkMeter], float]]] = {
    "kvmesh_link_bytes": ("KV bytes that arrived in their blocks", lambda m: m.bytes),
    "kvmesh_link_calls": ("Contiguous runs they were moved in", lambda m: m.calls),
    "kvmesh_link_frames": ("Frames that were answered with yes", lambda m: m.frames),
    "kvmesh_link_busy_seconds": ("Time with a transfer under way", lambda m: m.busy_s),
    "kvmesh_link_refused": ("Transfers and commits refused", lambda m: m.refused),
    "kvmesh_link_lost": ("Transfers and commits lost", lambda m: m.lost),
    "kvmesh_link_resumed": ("Pieces sent again after a cut connection", lambda m: m.resumed),
}
_GAUGES: dict[str, tuple[str, Callable[[LinkMeter], float]]] = {
    "kvmesh_link_queued_bytes": ("Asked for and not ended", lambda m: m.queued_bytes),
    "kvmesh_link_rtt_seconds": ("Smoothed TCP round trip", lambda m: m.rtt_s),
    "kvmesh_link_retransmits": ("TCP segments sent again on open ones", lambda m: m.retransmits),
}


class LinkCollector(Collector):
    """Reads the meters of the data plane, and asks the kernel, at scrape time."""

    def __init__(self, statistics: Sequence[Callable[[], TransferStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """The series of all links."""
        labels = ["peer", "channel", "direction"]
        links = [item for read in self._statistics for item in read().links.items()]
        for name, (text, of) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for key, meter in links:
                counter.add_metric(list(key), of(meter))
            yield counter
        for name, (text, of) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for key, meter in links:
                gauge.add_metric(list(key), of(meter))
            yield gauge
