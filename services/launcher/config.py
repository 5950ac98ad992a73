"""Configuration of the launcher for Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """The cluster and the Deployments whose size the launcher changes."""

    deployments: str = option(
        "", "Deployments of workers, NAME=ROLE[:SCENARIO[:CHECKPOINT]], comma-separated"
    )
    model: str = option("", "name under which all of these workers serve their model")
    namespace: str = option("default", "namespace of the Deployments")
    kubeconfig: str = option("", "kubeconfig file; empty: the service account of this pod")


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """The launcher, which starts and ends workers by the size of their Deployments."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    kubernetes: KubernetesConfig = option(KubernetesConfig, "")
