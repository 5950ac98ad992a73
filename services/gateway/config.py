"""Configuration of the gateway. Tests: tests/unit/gateway/test_config.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, secret
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one")
    max_body_bytes: int = option(16 * 1024 * 1024, "longest request body")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that is served."""

    path: str = option("models/pydoc-6m", "folder with tokenizer.json and the chat template")
    served_name: str = option("", "name that clients use; default: name of the folder")
    use_generation_config: bool = option(
        False, "take sampling defaults from generation_config.json"
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Where the schedulers are."""

    targets: str = option("127.0.0.1:7001", "host:port of the schedulers, comma-separated")
    route_timeout_s: float = option(0.5, "longest wait for a route plan")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Deadlines and limits of one request."""

    ttft_deadline_ms: int = option(10_000, "default longest wait until a worker takes a request")
    request_timeout_s: float = option(600.0, "longest life of a request")
    prefill_timeout_s: float = option(
        60.0, "a prefill without its first token or handoff after this long is lost"
    )
    stall_s: float = option(10.0, "a decode stream without tokens for this long is lost")
    max_moves: int = option(3, "how often lost work of one request is started again")
    max_choices: int = option(16, "largest n")
    max_prompts: int = option(64, "most prompts in one completions request")
    max_stop: int = option(16, "most stop strings")


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may call."""

    api_keys: str = secret("accepted bearer keys, comma-separated; empty accepts everyone")
    api_keys_file: str = option("", "file with one accepted bearer key per line")


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """What one caller may use."""

    max_concurrent_per_key: int = option(0, "requests of one key at once; 0 is no limit")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway: OpenAI-compatible HTTP and gRPC in front of the mesh."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    http: HttpConfig = option(HttpConfig, "")
    model: ModelConfig = option(ModelConfig, "")
    scheduler: SchedulerConfig = option(SchedulerConfig, "")
    limits: LimitsConfig = option(LimitsConfig, "")
    access: AccessConfig = option(AccessConfig, "")
    quota: QuotaConfig = option(QuotaConfig, "")
