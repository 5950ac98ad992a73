"""The launcher for Kubernetes: construction.

Tests: tests/integration/test_kubernetes.py.
"""

from __future__ import annotations

from kvmesh.core.clock import SystemClock
from kvmesh.core.launch import LaunchError
from kvmesh.rpc.launcher import LauncherServicer
from kvmesh.runtime.app import ServiceContext
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.launcher_service_pb2_grpc import add_LauncherServiceServicer_to_server
from services.launcher.cluster import open_cluster
from services.launcher.config import LauncherConfig
from services.launcher.deployments import read_deployments
from services.launcher.workers import KubernetesWorkers

log = event_logger(__name__)


async def build(config: LauncherConfig, context: ServiceContext) -> None:
    """Constructs the service."""
    settings = config.kubernetes
    deployments = read_deployments(settings.deployments)
    cluster = await open_cluster(settings)
    context.stack.push_async_callback(cluster.close)
    workers = KubernetesWorkers(cluster, deployments, settings.model, SystemClock())
    context.add_servicer(add_LauncherServiceServicer_to_server, LauncherServicer(workers))
    try:
        log.info("workers_found", num_workers=len(await workers.list()))
    except LaunchError as error:  # it may answer later; callers are told until then
        log.warning("cluster_not_seen", error=str(error))
