"""Spans of the OpenTelemetry SDK, for services that export traces.

Only `kvmesh.telemetry.tracing` loads this module, when tracing is configured.
Tests: tests/unit/telemetry/test_tracing.py.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvmesh.core.errors import ConfigError
from kvmesh.telemetry.tracing import TRACEPARENT, Allowance, AttributeValue, Span

_PROPAGATOR = TraceContextTextMapPropagator()


class JsonLinesExporter(SpanExporter):
    """Appends finished spans to a file, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a", buffering=1)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes the spans."""
        for span in spans:
            context = span.get_span_context()
            line = {
                "name": span.name,
                "service": span.resource.attributes.get("service.name"),
                "trace_id": f"{context.trace_id:032x}" if context else "",
                "span_id": f"{context.span_id:016x}" if context else "",
                "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
                "start_ns": span.start_time,
                "end_ns": span.end_time,
                "attributes": dict(span.attributes or {}),
                "events": [
                    {
                        "name": event.name,
                        "time_ns": event.timestamp,
                        "attributes": dict(event.attributes or {}),
                    }
                    for event in span.events
                ],
            }
            self._file.write(json.dumps(line, default=str) + "\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        self._file.close()


class SdkSpan(Span):
    """A stage of a request that is measured and exported."""

    __slots__ = ("_span",)
    is_kept = True

    def __init__(self, span: trace.Span) -> None:
        super().__init__("")
        self._span = span

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    @property
    def trace_id(self) -> str:
        """See `Span`."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def set(self, **attributes: AttributeValue) -> None:
        """See `Span`."""
        self._span.set_attributes(attributes)

    def event(self, name: str, **attributes: AttributeValue) -> None:
        """See `Span`."""
        self._span.add_event(name, attributes)

    def end(self) -> None:
        """See `Span`."""
        self._span.end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
        self._span.end()


class SdkSpans:
    """Makes the spans of this process, and exports those that are kept.

    Args:
        service: `service.name` of all spans.
        processor: gets all kept spans.
        allowance: decides about traces that begin here.
    """

    def __init__(self, service: str, processor: SpanProcessor, allowance: Allowance) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ALWAYS_ON,  # a span that is not kept is not an SDK span
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        trace.set_tracer_provider(self._provider)
        # Looking it up in the API costs 10 us.
        self._tracer = self._provider.get_tracer("kvmesh")
        self._allowance = allowance

    def start(self, name: str, parent: str, attributes: dict[str, AttributeValue]) -> Span:
        """See `start_span`."""
        found = TRACEPARENT.fullmatch(parent) if parent else None
        if found is None:
            if not self._allowance.takes(time.monotonic()):
                # Other services must not start the trace again; its id is in the logs.
                ids = random.getrandbits(192)
                return Span(f"00-{ids >> 64:032x}-{ids & (1 << 64) - 1:016x}-00")
        elif not int(found[2], 16) & 1:
            return Span(parent)
        context = _PROPAGATOR.extract({"traceparent": parent}) if parent else None
        return SdkSpan(self._tracer.start_span(name, context=context, attributes=attributes))

    def close(self) -> None:
        """Exports the remaining spans."""
        self._provider.shutdown()


def exporting(exporter: str, target: str) -> SpanProcessor:
    """Makes the processor that exports spans.

    Args:
        exporter: otlp or jsonl.
        target: collector endpoint (otlp) or file (jsonl).

    Raises:
        ConfigError: the file cannot be written.
    """
    if exporter == "jsonl":
        try:
            return SimpleSpanProcessor(JsonLinesExporter(Path(target)))
        except OSError as error:
            raise ConfigError(f"telemetry.trace.target {target}: {error.strerror}") from error
    # Imported late, so that an export to a file does not load it.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=target, insecure=True))
