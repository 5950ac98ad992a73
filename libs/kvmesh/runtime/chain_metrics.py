"""Metrics of prompts that several workers compute. Tests: tests/unit/docs/test_metrics.py."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class ChainMetrics:
    """What a worker counts of the beginnings that others are to compute for it.

    Attributes:
        parts: by what became of them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.parts = Counter(
            "kvmesh_prompt_parts",
            "Prompts whose beginning another worker was to compute, by what became of it",
            ["outcome"],
            registry=registry,
        )
