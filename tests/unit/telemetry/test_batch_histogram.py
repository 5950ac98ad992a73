from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvmesh.telemetry.batch_histogram import GATHERED, BatchHistogram
from kvmesh.telemetry.exposition import SHARED_FOLDER_VARIABLE

BUCKETS = (0.1, 0.5, 2.0)
AMOUNTS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 64.0])


@given(st.lists(st.lists(AMOUNTS)))
def test_observations_are_those_made_one_by_one(batches: list[list[float]]) -> None:
    expected, found = CollectorRegistry(), CollectorRegistry()
    single = Histogram("gap", "Gaps.", ["model"], registry=expected, buckets=BUCKETS).labels("m")
    batched = BatchHistogram("gap", "Gaps.", ["model"], registry=found, buckets=BUCKETS)
    found_at_once = batched.labels("m")
    for number, batch in enumerate(batches):
        for amount in batch:
            single.observe(amount)
            if number % 2:
                found_at_once.observe(amount)
        if not number % 2:
            found_at_once.observe_all(batch)
    for sample in ("gap_count", "gap_sum"):
        labels = {"model": "m"}
        value = expected.get_sample_value(sample, labels)
        assert abs((found.get_sample_value(sample, labels) or 0.0) - (value or 0.0)) < 1e-9
    assert _buckets(found) == _buckets(expected)


def _buckets(registry: CollectorRegistry) -> list[bytes]:
    lines = generate_latest(registry).splitlines()
    return [line for line in lines if line.startswith(b"gap_bucket")]


def test_an_observation_may_have_an_exemplar() -> None:
    registry = CollectorRegistry()
    histogram = BatchHistogram("gap", "Gaps.", registry=registry, buckets=BUCKETS)
    histogram.observe(0.2, {"trace_id": "x"})
    histogram.observe(0.3)
    assert registry.get_sample_value("gap_bucket", {"le": "0.5"}) == 2.0
    assert registry.get_sample_value("gap_sum") == 0.5


def test_few_observations_are_told_to_who_asks() -> None:
    registry = CollectorRegistry()
    histogram = BatchHistogram("gap", "Gaps.", registry=registry, buckets=BUCKETS)
    for number in range(GATHERED + 1):
        histogram.observe(0.3)
        assert registry.get_sample_value("gap_count") == number + 1


def test_what_other_processes_read_is_not_gathered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SHARED_FOLDER_VARIABLE, str(tmp_path))
    histogram = BatchHistogram("gap", "Gaps.", registry=CollectorRegistry(), buckets=BUCKETS)
    histogram.observe(0.3)
    histogram.observe_all([0.3])
    assert histogram._sum.get() == 0.6
