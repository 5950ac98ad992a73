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

    lease_s: float = positive(3.0, "a worker counts as lost after this long without a report")
    report_interval_s: float = positive(0.5, "interval at which workers report their load")
    warmup_s: float = option(1.0, "after the start, hold back an empty fleet view for this long")


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How the scheduler makes route plans."""

    policy: str = option("kvmesh", "kvmesh, or one of those listed in services/scheduler/README.md")
    placement: str = option("auto", "auto, disaggregated or aggregated, where a query leaves it")
    aggregate_tokens: int = option(
        AGGREGATE_TOKENS,
        "shorter uncached prompts run on an idle decode worker; 0: no prompt does",
    )
    joint_window_ms: float = option(
        JOINT_WINDOW_S * 1e3,
        "policies that decide jointly: milliseconds to wait for others while no worker is idle",
    )
    decisions: int = option(1000, "last decisions that /debug/decisions shows")


@dataclass(frozen=True, slots=True)
class PlanningConfig:
    """The loops over many requests: thresholds, roles, substitutes."""

    roles: str = option("apply", "role changes: apply, recommend (log and count them) or off")
    substitutes: str = option(
        "apply", "fill places of lost and ejected workers: apply, recommend or off"
    )
    scale: str = option(
        "recommend",
        "FlowKV's scale signal: apply (the launcher starts or ends one), recommend, off",
    )
    scale_by: str = option(
        "load",
        "what the signal follows: load (FlowKV's scores) or slots (as the chart's autoscalers)",
    )
    scale_min: int = positive(1, "fewest prefill or decode workers of a group that it leaves")
    scale_max: int = positive(16, "most prefill or decode workers of a group that it asks for")
    reallocate_s: float = positive(120.0, "interval at which the split of roles is evaluated")
    monitor_s: float = positive(WINDOW_S, "windows that the policy pdserve compares latencies over")
    remote_cluster: str = option("", "cluster that only prefills, for long prompts; empty: none")
    egress_mb_s: float = option(0.0, "megabytes per second that KV can leave it; 0: not measured")
    threshold_tokens: int = option(0, "uncached tokens above which to use it at first; 0: none")
    profile: str = option("", "costs of a model until they are measured, from kvmesh profile")


@dataclass(frozen=True, slots=True)
class KvManagerTarget:
    """The kvmanager to ask for prefix matches."""

    target: str = option("", "kvmanager host:port; empty routes without cache knowledge")
    timeout_s: float = positive(0.05, "longest time that a route waits for prefix matches")


@dataclass(frozen=True, slots=True)
class FleetStoreConfig:
    """The Redis that keeps the fleet over a restart of the scheduler."""

    url: str = option(
        "", "redis:// or redis+sentinel:// URL; empty rebuilds the fleet from the workers alone"
    )
    password: str = secret("password, if it is not part of the URL")
    key_prefix: str = option("kvmesh:", "start of all keys; two meshes in one Redis need two")
    password_file: str = option("", "file that holds the password")


@dataclass(frozen=True, slots=True)
class LauncherTarget:
    """The launcher, which starts and ends workers."""

    target: str = option("", "host:port, as of `kvmesh up`; empty: nobody does")


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
