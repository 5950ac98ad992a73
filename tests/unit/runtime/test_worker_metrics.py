"""Series of links come and go with their peers."""

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.core.types import WorkerId
from kvmesh.runtime import worker_metrics
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.transfer.meters import LinkKey, TransferSample


def test_the_series_of_the_link_unused_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_metrics, "MAX_LINKS", 2)
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)

    for peer, seconds in (("d0", 1.0), ("d1", 0.0), ("d0", 1.0), ("d2", 1.0), ("d3", 1.0)):
        key = LinkKey(WorkerId(peer), "tcp", "sent")
        metrics.observe_transfer(TransferSample(key, 10, 1, seconds))

    for name in ("kvmesh_link_transfer_seconds", "kvmesh_link_goodput_bytes_per_second"):
        counts = {
            sample.labels["peer"]: sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == f"{name}_count"
        }
        assert counts == {"d2": 1, "d3": 1}
