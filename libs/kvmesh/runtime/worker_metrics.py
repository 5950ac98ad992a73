"""Prometheus series of a worker, under vLLM's names where vLLM has them.

Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.engine.core import EngineCore
from kvmesh.transfer.meters import LinkMeter, TransferSample, TransferStatistics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RATES = tuple(float(10**6 * 2**power) for power in range(1, 15))
_LINK_COUNTERS: dict[str, tuple[str, Callable[[LinkMeter], float]]] = {
    "kvmesh_link_bytes": ("KV bytes that arrived in their blocks", lambda m: m.bytes),
    "kvmesh_link_calls": ("Contiguous runs they were moved in", lambda m: m.calls),
    "kvmesh_link_frames": ("Frames that were answered with yes", lambda m: m.frames),
    "kvmesh_link_busy_seconds": ("Time with a transfer under way", lambda m: m.busy_s),
    "kvmesh_link_refused": ("Transfers and commits refused", lambda m: m.refused),
    "kvmesh_link_lost": ("Transfers and commits lost", lambda m: m.lost),
    "kvmesh_link_resumed": ("Pieces sent again after a cut connection", lambda m: m.resumed),
}
_LINK_GAUGES: dict[str, tuple[str, Callable[[LinkMeter], float]]] = {
    "kvmesh_link_queued_bytes": ("Asked for and not ended", lambda m: m.queued_bytes),
    "kvmesh_link_rtt_seconds": ("Smoothed TCP round trip", lambda m: m.rtt_s),
    "kvmesh_link_retransmits": ("TCP segments sent again on open ones", lambda m: m.retransmits),
}
_BYTES = tuple(float(4**power) for power in range(5, 16))


class EngineCollector(Collector):
    """Reads the engine's own counters at scrape time, so that steps pay nothing for metrics."""

    def __init__(self, core: EngineCore, model_name: str) -> None:
        self._core = core
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """The series of the engine."""
        now = self._core.statistics()
        used = 1 - now.blocks_free / self._core.pool.num_blocks
        gauges = {
            "vllm:num_requests_running": ("Sequences in the batch", now.num_running),
            "vllm:num_requests_waiting": ("Sequences put back by preemption", now.num_preempted),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", used),
            "kvmesh_sequences_held": ("Sequences waiting for a transfer", now.num_held),
        }
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up", now.prompt_tokens_total),
            "vllm:prefix_cache_hits": ("Prompt tokens found cached", now.cached_tokens_total),
            "vllm:prompt_tokens": ("Prompt tokens admitted", now.prompt_tokens_total),
            "vllm:generation_tokens": ("Tokens generated", now.generated_tokens_total),
            "vllm:num_preemptions": ("Preemptions", now.preemptions_total),
            "kvmesh_engine_steps": ("Engine steps", now.steps_total),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


class LinkCollector(Collector):
    """Reads the meters of the data plane, and asks the kernel, at scrape time."""

    def __init__(self, statistics: Sequence[Callable[[], TransferStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """The series of all links."""
        labels = ["peer", "channel", "direction"]
        links = [item for read in self._statistics for item in read().links.items()]
        for name, (text, of) in _LINK_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for key, meter in links:
                counter.add_metric(list(key), of(meter))
            yield counter
        for name, (text, of) in _LINK_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for key, meter in links:
                gauge.add_metric(list(key), of(meter))
            yield gauge


class WorkerMetrics:
    """Series that the roles write."""

    def __init__(self, registry: CollectorRegistry = prometheus_client.REGISTRY) -> None:
        self.registry = registry
        self.step_seconds = Histogram(
            "kvmesh_engine_step_seconds", "Duration of a step", buckets=_SECONDS, registry=registry
        )
        self.offers = Counter(
            "kvmesh_prefill_offers", "Offers by outcome", ["outcome", "reason"], registry=registry
        )
        self.reservations = Counter(
            "kvmesh_decode_reservations",
            "Reservations by outcome",
            ["outcome", "reason"],
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "kvmesh_kv_transfer_seconds",
            "Time to send the KV of one request, commit included",
            ["dst", "outcome", "reason"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.transfer_bytes = Histogram(
            "kvmesh_kv_transfer_bytes",
            "KV bytes of one request",
            ["dst"],
            buckets=_BYTES,
            registry=registry,
        )
        self.transfer_calls = Histogram(
            "kvmesh_kv_transfer_calls",
            "Transfer calls of one request",
            ["dst"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        link = ["peer", "channel", "direction"]
        self.link_seconds = Histogram(
            "kvmesh_link_transfer_seconds",
            "Duration of one transfer call (sent) or frame (received)",
            link,
            buckets=_SECONDS,
            registry=registry,
        )
        self.link_goodput = Histogram(
            "kvmesh_link_goodput_bytes_per_second",
            "KV bytes of one transfer by its duration",
            link,
            buckets=_RATES,
            registry=registry,
        )

    def observe_transfer(self, sample: TransferSample) -> None:
        """One transfer on a link ended well."""
        self.link_seconds.labels(*sample.link).observe(sample.seconds)
        if sample.seconds > 0:
            self.link_goodput.labels(*sample.link).observe(sample.bytes / sample.seconds)

    def watch_links(self, *statistics: Callable[[], TransferStatistics]) -> None:
        """Exports the totals of both sides of the data plane."""
        self.registry.register(LinkCollector(statistics))
