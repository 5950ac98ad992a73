from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from kvmesh.core.errors import ConfigError
from kvmesh.telemetry.sdk_spans import JsonLinesExporter
from kvmesh.telemetry.tracing import Allowance, configure_tracing, start_span


def test_a_trace_travels_in_a_traceparent_and_lands_in_a_file(tmp_path: Path) -> None:
    # The global provider may be set once per process: this test needs none.
    file = tmp_path / "spans.jsonl"
    exporter = JsonLinesExporter(file)
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("root") as root:
        root.set_attribute("request_id", "r1")
        root.add_event("refused", {"reason": "busy"})
    provider.shutdown()
    line = json.loads(file.read_text())
    assert line["name"] == "root"
    assert line["attributes"] == {"request_id": "r1"}
    (event,) = line["events"]
    assert (event["name"], event["attributes"]) == ("refused", {"reason": "busy"})
    assert line["start_ns"] <= event["time_ns"] <= line["end_ns"]
    assert line["end_ns"] > line["start_ns"]


def test_without_a_provider_spans_cost_nothing_and_keep_the_callers_trace() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with start_span("child", parent, size=3) as span:
        assert span.trace_id == "0af7651916cd43dd8448eb211c80319c"
        assert span.traceparent.split("-")[1] == span.trace_id


@pytest.mark.parametrize("parent", ["", "none of ours", "00-xyz-1-01"])
def test_without_a_provider_a_bad_parent_is_no_trace(parent: str) -> None:
    with start_span("child", parent, size=3) as span:
        span.set(size=4)
        span.event("refused", reason="busy")
        assert (span.traceparent, span.trace_id) == ("", "0" * 32)


def test_a_caller_says_whether_its_request_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever share of traces that start here is kept."""
    # The global provider may be set once per process, and spans do not come from it.
    monkeypatch.setattr("kvmesh.telemetry.sdk_spans.trace.set_tracer_provider", lambda _: None)
    file = tmp_path / "spans.jsonl"
    ids = {1.0: "a" * 32, 0.0: "b" * 32}
    for ratio, flags in ((1.0, "00"), (0.0, "01")):
        with configure_tracing("test", "jsonl", str(file), Allowance(ratio)):
            start_span("asked", f"00-{ids[ratio]}-b7ad6b7169203331-{flags}").end()
            start_span("begun here").end()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [(line["name"], line["trace_id"]) for line in lines]
    assert [name for name, _ in kept] == ["begun here", "asked"]
    assert kept[1][1] == ids[0.0]


def test_a_trace_that_is_not_kept_is_not_begun_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.telemetry.sdk_spans.trace.set_tracer_provider", lambda _: None)
    file = tmp_path / "spans.jsonl"
    with configure_tracing("test", "jsonl", str(file), Allowance(0.0)):
        root = start_span("begun here")
        other = start_span("begun here")
    with configure_tracing("test", "jsonl", str(file)), start_span("child", root.traceparent) as it:
        assert it.trace_id == root.trace_id != other.trace_id
        assert not it.is_kept
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", root.traceparent)
    assert file.read_text() == ""


def test_so_many_traces_in_a_second_are_kept_and_none_is_saved_up_for_long() -> None:
    allowance = Allowance(per_second=3)
    allowance = Allowance(per_second=3)
    kept = [sum(allowance.takes(second + n / 100) for n in range(100)) for second in range(5)]
    assert kept[0] == 5  # the first ones at once, and those of this second
    assert kept[1:] == [3, 3, 3, 3]
    assert [allowance.takes(100.0) for _ in range(5)] == [True] * 3 + [False] * 2
    slow = Allowance(per_second=0.5)
    assert [slow.takes(float(n)) for n in range(6)] == [True, False, True, False, True, False]


def test_traces_without_a_bound_are_all_kept() -> None:
    allowance = Allowance()
    assert all(allowance.takes(1.0) for _ in range(1000))


@pytest.mark.parametrize(
    ("exporter", "target", "ratio", "option"),
    [
        ("otel", "", 1.0, "exporter"),
        ("jsonl", "spans.jsonl", 1.5, "ratio"),
        ("jsonl", "/nowhere/spans.jsonl", 1.0, "target"),
    ],
)
def test_what_cannot_trace_is_named(exporter: str, target: str, ratio: float, option: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"telemetry\.trace\.{option} "),
        configure_tracing("test", exporter, target, Allowance(ratio)),
    ):
        pass
