from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from kvmesh.core.types import WorkerLoad
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.kv.read_leases import ReadLeaseTable
from kvmesh.runtime.chain_metrics import ChainMetrics
from kvmesh.runtime.pool_metrics import PoolMetrics
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.runtime.tier_metrics import TierCollector
from kvmesh.runtime.worker_metrics import EngineCollector, WorkerMetrics
from services.gateway.metrics import GatewayMetrics
from services.kvmanager import metrics as kvmanager_metrics
from services.scheduler import metrics as scheduler_metrics
from tests.unit.docs.documents import ROOT, code_spans, documents

_ROW = re.compile(r"^\| `([a-z0-9_:]+)` \| (counter|gauge|histogram) \|", re.MULTILINE)
_METRIC = re.compile(r"vllm:[a-z0-9_]+|kvmesh_[a-z0-9]+_[a-z0-9_]+")


def documented(section: str) -> dict[str, str]:
    """Name and type of the metrics in a section's table."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    body = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    return dict(_ROW.findall(body))


def exported(metrics: Iterable[Metric]) -> dict[str, str]:
    """Name, as a scrape shows it, and type."""
    return {
        f"{metric.name}_total" if metric.type == "counter" else metric.name: metric.type
        for metric in metrics
    }


def of_module(module: ModuleType) -> dict[str, str]:
    found = [each for each in vars(module).values() if isinstance(each, MetricWrapperBase)]
    return exported(metric for each in found for metric in each.collect())


def of_worker() -> dict[str, str]:
    runner = FakeRunner(num_blocks=4)
    registry = CollectorRegistry()
    registry.register(EngineCollector(EngineCore(runner.spec, 4), "m", WorkerLoad))
    metrics = WorkerMetrics(registry)
    metrics.watch_links()
    metrics.show_native({})
    leases = ReadLeaseTable(1, 1.0, max_leases=1, max_blocks=1)
    PoolMetrics(registry).watch_leases(leases.statistics)
    QueryMetrics(registry).watch(lambda: (0, 0))
    ChainMetrics(registry)
    registry.register(TierCollector(lambda: (), None))
    return exported(registry.collect())


SECTIONS = {
    "Gateway": lambda: exported(GatewayMetrics().collect()),
    "Scheduler": lambda: of_module(scheduler_metrics),
    "Kvmanager": lambda: of_module(kvmanager_metrics),
    "Workers": of_worker,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_names_all_metrics_and_no_others(section: str) -> None:
    assert documented(section) == SECTIONS[section]()


def test_metrics_named_anywhere_exist() -> None:
    known = {name for read in SECTIONS.values() for name in read()}
    for document in documents():
        for span in code_spans(document):
            for name in _METRIC.findall(span.partition("{")[0]):
                assert name in known, f"{document.relative_to(ROOT)}: {name}"
