"""Metrics of the gateway. A metric that vLLM has too has vLLM's name.

Tests: tests/unit/gateway/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmesh.core.types import FinishReason
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.quota import Quota, Tenant
from kvmesh.telemetry.batch_histogram import BatchHistogram
from services.gateway.group_metrics import FINISHED, GroupMetrics, GroupsMetrics
from services.gateway.tenants.admission import Ticket

# vLLM's buckets, in seconds, so that existing dashboards and quantiles stay comparable.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
OFFER_BUCKETS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 55.0, 144.0)

TENANT = "tenant"
"""Label with a tenant's name. A port can omit the metrics that have it."""

_TTFT = "vllm:time_to_first_token_seconds"
_ITL = "vllm:inter_token_latency_seconds"
_E2E = "vllm:e2e_request_latency_seconds"
_QUEUE = "vllm:request_queue_time_seconds"
_PREFILL = "vllm:request_prefill_time_seconds"
_DECODE = "vllm:request_decode_time_seconds"
_INFERENCE = "vllm:request_inference_time_seconds"
_OFFERS = "kvmesh_gateway_prefill_offers"
_TIMES = {
    _TTFT: ("Arrival to first token.", TTFT_BUCKETS),
    _ITL: ("Gap between tokens.", ITL_BUCKETS),
    _E2E: ("Arrival to last token.", E2E_BUCKETS),
    _QUEUE: ("Arrival to acceptance by prefill.", E2E_BUCKETS),
    _PREFILL: ("Acceptance to first token.", E2E_BUCKETS),
    _DECODE: ("First token to last.", E2E_BUCKETS),
    _INFERENCE: ("Acceptance to last token.", E2E_BUCKETS),
    _OFFERS: ("Offers until a worker accepted.", OFFER_BUCKETS),
}

_PROMPT_TOKENS, _GENERATION_TOKENS = "vllm:prompt_tokens", "vllm:generation_tokens"
_SUCCESS = "vllm:request_success"
_MODEL_COUNTERS = {
    _PROMPT_TOKENS: ("Prompt tokens of finished requests.", "model_name"),
    _GENERATION_TOKENS: ("Tokens sent to clients.", "model_name"),
    _SUCCESS: ("Finished requests.", "model_name", "finished_reason"),
}


class ModelMetrics:
    """Metrics of one model's requests.

    Args:
        times: histograms by name.
        counters: counters by name.
        model: value of the label `model_name`.
    """

    def __init__(
        self, times: Mapping[str, BatchHistogram], counters: Mapping[str, Counter], model: str
    ) -> None:
        self._model = model
        self._success = counters[_SUCCESS]
        self._finished: dict[FinishReason, Counter] = {}
        self.ttft_s = times[_TTFT].labels(model)
        self.itl_s = times[_ITL].labels(model)
        self.e2e_s = times[_E2E].labels(model)
        self.queue_s = times[_QUEUE].labels(model)
        self.prefill_s = times[_PREFILL].labels(model)
        self.decode_s = times[_DECODE].labels(model)
        self.inference_s = times[_INFERENCE].labels(model)
        self.prefill_offers = times[_OFFERS].labels(model)
        self.prompt_tokens = counters[_PROMPT_TOKENS].labels(model)
        self.generation_tokens = counters[_GENERATION_TOKENS].labels(model)

    def finished(self, reason: FinishReason) -> None:
        """Counts a finished request."""
        counter = self._finished.get(reason)
        if counter is None:
            counter = self._success.labels(self._model, FINISHED[reason])
            self._finished[reason] = counter
        counter.inc()


class GatewayMetrics(Collector):
    """The gateway's metrics, in a registry that another registry can collect."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._used: dict[str, Counter] = {}
        self._times = {name: self._histogram(name, *about) for name, about in _TIMES.items()}
        self._by_model = {
            name: self._counter(name, text, *labels)
            for name, (text, *labels) in _MODEL_COUNTERS.items()
        }
        self.requests_open = self._gauge(
            "kvmesh_gateway_requests_open", "Generations that run now."
        )
        self.connections = self._gauge(
            "kvmesh_gateway_connections", "Open connections of the HTTP port."
        )
        self.journal_bytes = self._gauge(
            "kvmesh_gateway_journal_bytes", "Held in the journal for streams of this gateway."
        )
        self._library = Gauge(
            "kvmesh_gateway_tokenizer",
            "Processes by the library that turns their prompts into tokens.",
            ["library"],
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._add_counters()
        self._groups = GroupsMetrics(self._registry, TTFT_BUCKETS, ITL_BUCKETS)

    def of_group(self, group: GroupKey) -> GroupMetrics:
        """The metrics of a group's requests."""
        return self._groups.of(group)

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model's requests."""
        return ModelMetrics(self._times, self._by_model, model)

    def _add_counters(self) -> None:
        self._refusals = self._counter(
            "kvmesh_gateway_refusals",
            "Refusals met, by who said no; those of workers are tried elsewhere.",
            "reason",
            "stage",
        )
        self._moves = self._counter(
            "kvmesh_gateway_moves", "Work that was lost and started again elsewhere.", "reason"
        )
        self.connections_cut = self._counter(
            "kvmesh_gateway_connections_cut",
            "Connections of the HTTP port that were cut, and why.",
            "reason",
        )
        self._resumes = self._counter(
            "kvmesh_gateway_resumes", "Streams that clients asked to go on with.", "outcome"
        )
        self._over_quota = self._counter(
            "kvmesh_gateway_over_quota",
            "Requests refused because a quota was used up.",
            TENANT,
            "quota",
        )
        self._tenant_tokens = self._counter(
            "kvmesh_gateway_tenant_tokens",
            "Prompt and generated tokens of ended requests.",
            TENANT,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> BatchHistogram:
        labels = ["model_name"]
        return BatchHistogram(name, text, labels, registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry, multiprocess_mode="livesum")

    def refused(self, reason: str, stage: str) -> None:
        """Counts a refusal."""
        self._refusals.labels(reason, stage).inc()

    def over_quota(self, tenant: Tenant, quota: Quota) -> None:
        """Counts a request over quota; unregistered tenants are counted together."""
        self._over_quota.labels(tenant.name if tenant.is_known else "", quota.value).inc()

    def used(self, ticket: Ticket) -> None:
        """Counts a finished request's usage; unregistered tenants are counted together."""
        tenant = ticket.tenant
        name = tenant.name if tenant.is_known else ""
        counter = self._used.get(name)
        if counter is None:
            counter = self._used[name] = self._tenant_tokens.labels(name)
        counter.inc(ticket.num_tokens)

    def encodes_by(self, library: str) -> None:
        """Sets the library that tokenises prompts."""
        self._library.labels(library).set(1)

    def moved(self, reason: str) -> None:
        """Counts a request that a worker lost and that moves to another one."""
        self._moves.labels(reason).inc()

    def resumed(self, outcome: str) -> None:
        """Counts an attempt to resume a stream, by its outcome."""
        self._resumes.labels(outcome).inc()

    def refusals(self) -> dict[tuple[str, str], float]:
        """Refusals met since start, by (stage, reason)."""
        return {
            (sample.labels["stage"], sample.labels["reason"]): sample.value
            for metric in self._refusals.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }

    def value(self, sample: str, **labels: str) -> float:
        """A sample's value now; 0 if it was never counted."""
        return self._registry.get_sample_value(sample, labels) or 0.0

    def describe(self) -> Iterable[Metric]:
        """Returns no names, so that one registry accepts the metrics of two gateways."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The metrics, for the registry that collects this one."""
        return self._registry.collect()
