"""Metrics of prompts that several workers compute. Tests: tests/unit/docs/test_metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class ChainMetrics:
    """Counters of a worker's prompts whose beginning another worker was to compute.

    Attributes:
        parts: beginnings by outcome.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.parts = Counter(
            "kvmesh_prompt_parts",
            "Prompts whose beginning another worker was to compute, by what became of it",
            ["outcome"],
            registry=registry,
        )
