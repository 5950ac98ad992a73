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
        "", "Deployments of workers as NAME=ROLE[:SCENARIO[:CHECKPOINT]], comma-separated"
    )
    model: str = option("", "name of the model that all these workers serve")
    namespace: str = option("default", "namespace of the Deployments")
    kubeconfig: str = option("", "kubeconfig file; empty: use the pod's service account")


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """The launcher, which starts and ends workers by the size of their Deployments."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    kubernetes: KubernetesConfig = option(KubernetesConfig, "")
