"""Prometheus metrics of a worker, under vLLM's names where vLLM has them.

Tests: tests/integration/test_worker.py.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmesh.core.types import WorkerLoad
from kvmesh.engine.core import EngineCore
from kvmesh.runtime.link_metrics import LinkCollector
from kvmesh.transfer.meters import MAX_LINKS, LinkKey, TransferSample, TransferStatistics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RATES = tuple(float(10**6 * 2**power) for power in range(1, 15))
_BYTES = tuple(float(4**power) for power in range(5, 16))


class EngineCollector(Collector):
    """Reads the worker's own counters at scrape time, so that metrics cost nothing in a step.

    Args:
        load: returns the load that the worker reports to schedulers.
    """

    def __init__(self, core: EngineCore, model_name: str, load: Callable[[], WorkerLoad]) -> None:
        self._core = core
        self._model_name = model_name
        self._load = load

    def collect(self) -> Iterator[Metric]:
        """The metrics of the engine and of both roles' slots."""
        now, load = self._core.statistics(), self._load()
        used = 1 - now.blocks_free / self._core.pool.num_blocks
        gauges = {
            "vllm:num_requests_running": ("Sequences in the batch", now.num_running),
            "vllm:num_requests_waiting": ("Sequences put back by preemption", now.num_preempted),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", used),
            "kvmesh_sequences_held": ("Sequences waiting for a transfer", now.num_held),
            "kvmesh_swapped_blocks": ("Blocks in host memory", now.swap.blocks_kept),
            "kvmesh_prefill_slots_used": ("Prompts held for prefill", load.prefill_active),
            "kvmesh_decode_sequences": ("Sequences past their handoff", load.decode_running),
            "kvmesh_decode_reservations_open": (
                "Reservations waiting for their KV",
                load.decode_reserved,
            ),
        }
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up", now.prompt_tokens_total),
            "vllm:prefix_cache_hits": ("Prompt tokens found cached", now.cached_tokens_total),
            "vllm:prompt_tokens": ("Prompt tokens admitted", now.prompt_tokens_total),
            "vllm:generation_tokens": ("Tokens generated", now.generated_tokens_total),
            "vllm:num_preemptions": ("Preemptions", now.preemptions_total),
            "kvmesh_swaps_out": ("Preempted to host memory", now.swap.swapped_out_total),
            "kvmesh_swaps_in": ("Brought back from host memory", now.swap.swapped_in_total),
            "kvmesh_engine_steps": ("Engine steps", now.steps_total),
        }
        queues = GaugeMetricFamily(
            "kvmesh_queue_sequences",
            "Sequences by side and by what they wait for",
            labels=["model_name", "side", "queue"],
        )
        for side, lengths in zip(("prefill", "decode"), self._core.queues(), strict=True):
            for queue, length in dataclasses.asdict(lengths).items():
                queues.add_metric([self._model_name, side, queue], length)
        yield queues
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter


class WorkerMetrics:
    """Metrics that the roles update."""

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
            "Time to send the KV of one request",
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
        self.transfer_modes = Counter(
            "kvmesh_kv_transfer_modes",
            "Requests by the mode that their KV leaves in",
            ["mode"],
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
        self._links: OrderedDict[LinkKey, None] = OrderedDict()

    def show_native(self, levels: Mapping[str, str]) -> None:
        """Exports the native libraries in use, as `native_levels` returns them. Call it once."""
        native = Gauge(
            "kvmesh_native_library",
            "1 with this library of native code, 0 where it is missing and the worker is slower",
            ["library", "level"],
            registry=self.registry,
        )
        for library, level in levels.items():
            native.labels(library, level or "none").set(bool(level))

    def observe_transfer(self, sample: TransferSample) -> None:
        """Adds a transfer that succeeded."""
        self._remember(sample.link)
        self.link_seconds.labels(*sample.link).observe(sample.seconds)
        if sample.seconds > 0:
            self.link_goodput.labels(*sample.link).observe(sample.bytes / sample.seconds)

    def _remember(self, link: LinkKey) -> None:
        """Drops the metrics of the least recent link: peers return under new names."""
        self._links[link] = None
        self._links.move_to_end(link)
        if len(self._links) > MAX_LINKS:
            oldest, _ = self._links.popitem(last=False)
            self.link_seconds.remove(*oldest)
            self.link_goodput.remove(*oldest)

    def watch_links(self, *statistics: Callable[[], TransferStatistics]) -> None:
        """Exports the totals of both sides of the data plane."""
        self.registry.register(LinkCollector(statistics))
