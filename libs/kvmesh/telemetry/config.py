"""Config sections for logs, traces and metrics that every service has."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logs."""

    level: str = option("info", "debug, info, warning or error")
    format: str = option("auto", "json, text, or auto: text on a terminal, else json")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Traces."""

    exporter: str = option("none", "none, otlp or jsonl")
    target: str = option("", "host:port of the collector (otlp), or a file (jsonl)")
    ratio: float = option(1.0, "fraction of requests that are traced, 0 to 1")
    per_second: float = option(0.0, "maximum traced requests per second; 0: no limit")


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Logs, traces and metrics."""

    log: LogConfig = option(LogConfig, "")
    trace: TraceConfig = option(TraceConfig, "")
    metrics_port: int = option(-1, "Prometheus port; 0 picks a free one, -1 turns it off")
