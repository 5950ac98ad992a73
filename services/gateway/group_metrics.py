"""Metrics of the gateway by group of workers. Tests: tests/unit/gateway/test_group_metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from kvmesh.core.types import FinishReason
from kvmesh.policy.groups import GroupKey
from kvmesh.telemetry.batch_histogram import BatchHistogram

FINISHED = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}
"""vLLM's words for `finished_reason`."""

_LABELS = ("model_name", "checkpoint", "scenario")


class GroupMetrics:
    """Metrics of one group's requests.

    Args:
        every: the metrics of all groups.
        group: its key; gateways count over all clusters, because the scheduler chooses the cluster.
    """

    def __init__(self, every: GroupsMetrics, group: GroupKey) -> None:
        self._every = every
        self._labels = (group.model, group.checkpoint, group.scenario)
        self._requests: dict[FinishReason, Counter] = {}
        self._refusals: dict[str, Counter] = {}
        self.ttft_s = every.ttft_s.labels(*self._labels)
        self._tpot_s = every.tpot_s.labels(*self._labels)

    def ended(self, reason: FinishReason, decode_s: float, num_tokens: int) -> None:
        """Counts an ended request.

        Args:
            decode_s: seconds from its first token to its last one.
            num_tokens: number of generated tokens.
        """
        counter = self._requests.get(reason)
        if counter is None:
            counter = self._every.requests.labels(*self._labels, FINISHED[reason])
            self._requests[reason] = counter
        counter.inc()
        if num_tokens > 1:
            self._tpot_s.observe(decode_s / (num_tokens - 1))

    def refused(self, reason: str) -> None:
        """Counts a refusal that one of its requests met."""
        counter = self._refusals.get(reason)
        if counter is None:
            counter = self._refusals[reason] = self._every.refusals.labels(*self._labels, reason)
        counter.inc()


class GroupsMetrics:
    """Metrics of all groups.

    Args:
        registry: registry that gets the metrics.
        ttft_buckets: upper bounds of the histogram of times to first token, in seconds.
        tpot_buckets: upper bounds of the histogram of times per token, in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        ttft_buckets: tuple[float, ...],
        tpot_buckets: tuple[float, ...],
    ) -> None:
        self._of: dict[GroupKey, GroupMetrics] = {}
        self.requests = Counter(
            "kvmesh_gateway_group_requests",
            "Ended requests of a group.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self.refusals = Counter(
            "kvmesh_gateway_group_refusals",
            "Refusals that a group's requests met; those of workers are tried elsewhere.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self.ttft_s = BatchHistogram(
            "kvmesh_gateway_group_ttft_seconds",
            "Arrival to first token.",
            _LABELS,
            registry=registry,
            buckets=ttft_buckets,
        )
        self.tpot_s = BatchHistogram(
            "kvmesh_gateway_group_tpot_seconds",
            "Mean time per token after the first one.",
            _LABELS,
            registry=registry,
            buckets=tpot_buckets,
        )

    def of(self, group: GroupKey) -> GroupMetrics:
        """The metrics of one group."""
        found = self._of.get(group)
        if found is None:
            found = self._of[group] = GroupMetrics(self, group)
        return found
