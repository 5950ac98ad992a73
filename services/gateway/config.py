"""Configuration of the gateway. Tests: tests/unit/gateway/test_config.py."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from kvmesh.core.config import option, positive, secret
from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed, named_numbers, named_values
from kvmesh.engine.model_source import served_name
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.rpc.channels import TlsConfig
from kvmesh.rpc.convert import limit_from_ms
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one")
    max_body_bytes: int = positive(16 * 1024 * 1024, "maximum size of a request body, in bytes")
    processes: int = positive(
        1, "number of gateway processes that share the ports; about one per core"
    )
    header_timeout_s: float = positive(
        20.0, "maximum seconds to receive the request line and headers"
    )
    body_timeout_s: float = positive(60.0, "maximum seconds to receive a request's body")
    idle_timeout_s: float = positive(75.0, "seconds after which an idle connection is closed")
    stall_timeout_s: float = positive(
        60.0, "seconds after which a client that reads nothing is disconnected"
    )
    max_connections: int = option(10_000, "maximum open connections; 0: no limit")
    max_connections_per_address: int = option(
        2048,
        "maximum open connections per client address; 0: no limit, for use behind a load balancer",
    )
    tenant_metrics: bool = option(
        False, "include tenant names in GET /metrics of this port, for every caller"
    )
    adapter_changes: bool = option(
        False,
        "serve POST /v1/load_lora_adapter and /v1/unload_lora_adapter to every caller of this port",
    )
    tls: TlsConfig = option(TlsConfig, "")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The models that the gateway serves. All fields but `others` describe the first one.

    For the other models, the chat templates tell the format of tool calls and thinking.
    """

    path: str = option(
        "models/pydoc-6m",
        "folder with tokenizer.json and the chat template, or org/name on the Hugging Face hub",
    )
    served_name: str = option(
        "", "model name that clients use; empty: the folder name, or org/name"
    )
    aliases: str = option("", "additional names of the model for clients, comma-separated")
    others: str = option(
        "",
        "further models, served by other workers, as NAME=FOLDER, comma-separated; repeat "
        "a folder to give its model another name",
    )
    use_generation_config: bool = option(
        False, "use the sampling defaults of generation_config.json"
    )
    tool_calls: str = option(
        "auto",
        "format of tool calls: auto (detected from the chat template), hermes, "
        "llama3_json, mistral, qwen3_coder, deepseek_v3, kimi_k2, glm45, minimax, openai "
        "or none",
    )
    reasoning_parser: str = option(
        "auto",
        "format of reasoning: auto (detected from the chat template), qwen3, deepseek_r1, "
        "mistral, openai_gptoss or none",
    )

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_name or served_name(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use, its own first."""
        return tuple(dict.fromkeys((self.name, *listed(self.aliases))))

    @property
    def every(self) -> tuple[ModelConfig, ...]:
        """This model and the others, each as the config of a gateway that serves only that model.

        Raises:
            ConfigError: `others` is malformed, or two models share a name.
        """
        names: dict[str, list[str]] = {}
        for name, folder in named_values(self.others, "model.others", "NAME=FOLDER").items():
            names.setdefault(folder, []).append(name)
        every = (
            replace(self, others=""),
            *(
                ModelConfig(folder, own, ",".join(more), "", self.use_generation_config)
                for folder, (own, *more) in names.items()
            ),
        )
        taken = Counter(name for each in every for name in each.names)
        if twice := [name for name, times in taken.items() if times > 1]:
            raise ConfigError(f"model.others: two models have the name {', '.join(twice)}")
        return every


@dataclass(frozen=True, slots=True)
class SchedulerTargets:
    """Addresses of the schedulers."""

    targets: str = option("127.0.0.1:7001", "schedulers as host:port, comma-separated")
    route_timeout_s: float = positive(0.5, "maximum seconds to wait for a route plan")


@dataclass(frozen=True, slots=True)
class ScenarioConfig:
    """The scenario of requests, which chooses their group; see docs/groups.md.

    The header `x-kvmesh-scenario` comes first, then the model's scenario, then the tenant's. A
    scenario without workers is passed over.
    """

    of_models: str = option(
        "",
        "scenario of requests for a model name, alias or adapter, as MODEL=SCENARIO, "
        "comma-separated",
    )
    of_tenants: str = option(
        "",
        "scenario of requests of a tenant in the tenant directory, as TENANT=SCENARIO, "
        "comma-separated",
    )
    default: str = option("", "scenario of all other requests; empty: the group of no scenario")
    ttft_ms: str = option(
        "",
        "default deadlines until a worker accepts a request, in milliseconds, as SCENARIO=MS, "
        "comma-separated; other scenarios have those of the section limits",
    )
    tpot_ms: str = option("", "default limits on the mean time per output token (TPOT), likewise")
    itl_ms: str = option("", "default limits on the time between two tokens (ITL), likewise")


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Deadlines and limits of one request."""

    ttft_deadline_ms: int = positive(
        10_000, "default deadline until a worker accepts a request, in milliseconds"
    )
    ttft_tiers: str = option(
        "",
        "shorter deadlines for short prompts, as TOKENS=MS, comma-separated: prompts of "
        "up to TOKENS tokens wait at most MS; longer ones wait ttft_deadline_ms",
    )
    tpot_limit_ms: int = option(
        0, "default limit on the mean time per output token (TPOT), in milliseconds; 0: no limit"
    )
    itl_limit_ms: int = option(
        0, "default limit on the time between two tokens (ITL), in milliseconds; 0: no limit"
    )
    request_timeout_s: float = positive(
        600.0, "maximum seconds from the arrival of a request to its end"
    )
    prefill_timeout_s: float = positive(
        60.0, "seconds without progress of a prompt or its handoff after which it counts as lost"
    )
    stall_s: float = positive(
        10.0, "seconds without tokens after which a decode stream counts as lost"
    )
    max_moves: int = option(
        3, "maximum number of times that a request moves to another worker after a loss"
    )
    max_choices: int = positive(16, "maximum n (choices per prompt)")
    max_prompts: int = positive(64, "maximum prompts per completions request")
    max_stop: int = option(16, "maximum stop strings per request")
    max_stop_chars: int = option(1024, "maximum characters of a stop string")
    max_sequences: int = positive(128, "maximum sequences per request (n times prompts)")
    max_prompt_chars: int = positive(4_000_000, "maximum characters of all prompts of one request")

    def tiers(self) -> tuple[TimeoutTier, ...]:
        """The default waits by prompt length, shortest first; the last is for all longer prompts.

        Raises:
            ConfigError: `ttft_tiers` is malformed, or a shorter prompt would wait longer.
        """
        form = "TOKENS=MS with numbers above 0"
        waits: dict[int, int] = {}
        for tokens, wait in named_numbers(self.ttft_tiers, "limits.ttft_tiers", form).items():
            if not (tokens.isdecimal() and int(tokens)):
                raise ConfigError(f"limits.ttft_tiers is {form}; got {tokens}={wait}")
            waits[int(tokens)] = wait
        rising = [*sorted(waits.items()), (sys.maxsize, self.ttft_deadline_ms)]
        if any(shorter > longer for (_, shorter), (_, longer) in pairwise(rising)):
            raise ConfigError(
                f"limits.ttft_tiers: waits must not fall with length, nor exceed "
                f"limits.ttft_deadline_ms={self.ttft_deadline_ms}; got {self.ttft_tiers}"
            )
        return tuple(TimeoutTier(tokens, wait / 1000) for tokens, wait in rising)

    def patience_s(self, ttft_ms: int) -> float:
        """Longest wait for workers in seconds of a prompt whose length is not known yet.

        Args:
            ttft_ms: what the client says; 0 takes the default of the longest prompts.
        """
        return (ttft_ms or self.ttft_deadline_ms) / 1000

    def rates_s(self, tpot_ms: int, itl_ms: int) -> tuple[float, float]:
        """Returns the limits on the times of a request's tokens in seconds; infinite is no limit.

        Args:
            tpot_ms: longest mean time per token; 0 takes the default, here and below.
            itl_ms: longest time between two tokens.
        """
        itl_s = limit_from_ms(itl_ms or self.itl_limit_ms)
        # If no gap exceeds this limit, the mean does not either.
        return min(limit_from_ms(tpot_ms or self.tpot_limit_ms), itl_s), itl_s


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Authentication of callers."""

    api_keys: str = secret("accepted bearer keys, comma-separated; empty: no key is needed")
    api_keys_file: str = option("", "file with one accepted bearer key per line")
    tenants_file: str = option("", "file with tenants and hashed keys, as written by `kvmesh keys`")
    tenants_in_redis: bool = option(False, "read tenants and hashed keys from Redis")
    refresh_s: float = positive(2.0, "interval in seconds at which tenants and keys are read again")


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """Limits of callers that are not in the tenant directory; 0 is no limit."""

    max_concurrent_per_key: int = option(0, "maximum concurrent requests per key")
    requests_per_min_per_key: int = option(0, "maximum requests per key and minute")
    tokens_per_min_per_key: int = option(
        0, "maximum prompt and generated tokens per key and minute"
    )
    burst_s: float = positive(
        10.0, "burst size: seconds of a rate limit that may be used at once; also for tenants"
    )


@dataclass(frozen=True, slots=True)
class SharedRedisConfig:
    """The Redis in which gateways share tenants' usage and the journal of streams."""

    url: str = option(
        "",
        "redis:// or redis+sentinel:// URL; empty: each gateway counts quotas alone, and "
        "its streams end with it",
    )
    password: str = secret("Redis password, if the URL does not contain it")
    key_prefix: str = option(
        "kvmesh:", "prefix of all keys; two meshes in one Redis need different prefixes"
    )
    timeout_s: float = positive(0.5, "timeout of one call, in seconds")
    password_file: str = option("", "file with the Redis password")


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """The journal, with which another gateway can resume a stream; see `redis.url`."""

    journal_mib: int = option(
        64,
        "maximum MiB of Redis memory for the streams of one gateway process; 0: no "
        "journal, streams end with their gateway",
    )
    keep_s: float = positive(60.0, "seconds for which a stream is kept after its end")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway: OpenAI-compatible HTTP and gRPC in front of the mesh."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    http: HttpConfig = option(HttpConfig, "")
    model: ModelConfig = option(ModelConfig, "")
    scheduler: SchedulerTargets = option(SchedulerTargets, "")
    scenario: ScenarioConfig = option(ScenarioConfig, "")
    limits: LimitsConfig = option(LimitsConfig, "")
    access: AccessConfig = option(AccessConfig, "")
    quota: QuotaConfig = option(QuotaConfig, "")
    redis: SharedRedisConfig = option(SharedRedisConfig, "")
    resume: ResumeConfig = option(ResumeConfig, "")
