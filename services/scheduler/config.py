"""Configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, positive, secret
from kvmesh.policy.joint_choice import JOINT_WINDOW_S
from kvmesh.policy.ranking import AGGREGATE_TOKENS
from kvmesh.policy.ratio_monitor import WINDOW_S
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How the scheduler tracks workers."""

    lease_s: float = positive(3.0, "seconds without a report after which a worker counts as lost")
    report_interval_s: float = positive(
        0.5, "interval in seconds at which workers report their load"
    )
    warmup_s: float = option(
        1.0, "seconds after the start during which an empty fleet view is not sent to gateways"
    )


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How the scheduler makes route plans."""

    policy: str = option(
        "kvmesh", "routing policy: kvmesh, or another one listed in services/scheduler/README.md"
    )
    placement: str = option(
        "auto", "placement for requests that do not set one: auto, disaggregated or aggregated"
    )
    aggregate_tokens: int = option(
        AGGREGATE_TOKENS,
        "prompts with fewer uncached tokens are prefilled on an idle decode worker; 0: never",
    )
    joint_window_ms: float = option(
        JOINT_WINDOW_S * 1e3,
        "for joint dispatch policies: milliseconds to wait for more requests while no "
        "worker is idle",
    )
    decisions: int = option(1000, "number of recent decisions that /debug/decisions shows")


@dataclass(frozen=True, slots=True)
class PlanningConfig:
    """The loops over many requests: thresholds, roles, substitutes."""

    roles: str = option(
        "apply", "role changes of workers: apply, recommend (only log and count them) or off"
    )
    substitutes: str = option(
        "apply", "replacement of lost and ejected workers: apply, recommend or off"
    )
    scale: str = option(
        "recommend",
        "FlowKV's scale signal: apply (the launcher starts or ends a worker), recommend or off",
    )
    scale_by: str = option(
        "load",
        "input of the scale signal: load (FlowKV's load scores) or slots (slots in use, "
        "as the chart's autoscalers)",
    )
    scale_min: int = positive(
        1, "minimum prefill workers, and decode workers, per group when scaling down"
    )
    scale_max: int = positive(
        16, "maximum prefill workers, and decode workers, per group when scaling up"
    )
    reallocate_s: float = positive(
        120.0, "interval in seconds at which the split into prefill and decode roles is evaluated"
    )
    monitor_s: float = positive(
        WINDOW_S, "seconds per window in which the policy pdserve compares latencies"
    )
    remote_cluster: str = option("", "cluster that only prefills long prompts; empty: none")
    egress_mb_s: float = option(
        0.0, "bandwidth for KV out of the remote cluster, in megabytes per second; 0: unknown"
    )
    threshold_tokens: int = option(
        0, "initial threshold: prompts with more uncached tokens go to the remote cluster; 0: none"
    )
    profile: str = option(
        "", "profile file (from `kvmesh profile`) with the costs to use until they are measured"
    )


@dataclass(frozen=True, slots=True)
class KvManagerTarget:
    """The kvmanager to ask for prefix matches."""

    target: str = option("", "kvmanager as host:port; empty: route without knowledge of caches")
    timeout_s: float = positive(0.05, "maximum seconds that a route waits for prefix matches")


@dataclass(frozen=True, slots=True)
class FleetStoreConfig:
    """The Redis that keeps the fleet over a restart of the scheduler."""

    url: str = option(
        "",
        "redis:// or redis+sentinel:// URL; empty: after a restart, rebuild the fleet "
        "from the workers' reports",
    )
    password: str = secret("Redis password, if the URL does not contain it")
    key_prefix: str = option(
        "kvmesh:", "prefix of all keys; two meshes in one Redis need different prefixes"
    )
    password_file: str = option("", "file with the Redis password")


@dataclass(frozen=True, slots=True)
class LauncherTarget:
    """The launcher, which starts and ends workers."""

    target: str = option(
        "", "launcher as host:port (`kvmesh up` sets it); empty: workers are not started or ended"
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The global scheduler: fleet registry and route plans."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    fleet: FleetConfig = option(FleetConfig, "")
    routing: RoutingConfig = option(RoutingConfig, "")
    planning: PlanningConfig = option(PlanningConfig, "")
    kvmanager: KvManagerTarget = option(KvManagerTarget, "")
    redis: FleetStoreConfig = option(FleetStoreConfig, "")
    launcher: LauncherTarget = option(LauncherTarget, "")
