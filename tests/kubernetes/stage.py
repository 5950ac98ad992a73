"""A cluster for tests: an API server, and the parts of Kubernetes that change objects there.

Those are played by `Controllers`: Deployments get their pods and lose them in the order that
Kubernetes' ReplicaSet controller has; pods get ready, and end when they have drained.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kvmesh.core.config import load_config
from kvmesh.rpc.channels import MeshAccess
from kvmesh.rpc.launcher import RemoteLauncher
from kvmesh.runtime.app import serving
from scripts.render_manifests import render
from services.launcher.config import LauncherConfig
from services.launcher.service import build
from tests.kubernetes.api_server import api_server
from tests.kubernetes.twin import kubernetes_twin

NAMESPACE = "default"
ADMIN, LAUNCHER, STRANGER = "the-admin-s-token", "the-launcher-s-token", "a-stranger-s-token"
USERS = {
    ADMIN: "system:admin",
    LAUNCHER: f"system:serviceaccount:{NAMESPACE}:kvmesh-launcher",
    STRANGER: f"system:serviceaccount:{NAMESPACE}:default",
}
GROUPS = [
    {"name": "chat", "scenario": "chat", "checkpoint": "/models/two"},
    {"name": "next", "checkpoint": "/models/three"},
]
DEPLOYMENT_LABEL = "kvmesh/deployment"
COST = "controller.kubernetes.io/pod-deletion-cost"

Object = dict[str, Any]


@cache
def trusting(certificate: Path | None) -> ssl.SSLContext | bool:
    """What aiohttp takes to trust a certificate; None for plain text."""
    return True if certificate is None else ssl.create_default_context(cafile=str(certificate))


@dataclass
class Api:
    """Calls to an API server with one token; errors are returned as the server's `Status`."""

    url: str
    token: str
    certificate: Path | None

    async def call(self, method: str, path: str, body: Object | None = None) -> Object:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(
                method, self.url + path, json=body, ssl=trusting(self.certificate)
            ) as answer,
        ):
            found: Object = await answer.json()
            return found

    def kubeconfig(self, folder: Path) -> Path:
        """Writes a kubeconfig file for this token."""
        cluster = {"server": self.url}
        if self.certificate is not None:
            cluster["certificate-authority"] = str(self.certificate)
        file = folder / f"{self.token}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [{"name": "here", "context": {"cluster": "it", "user": "me"}}],
            "current-context": "here",
        }
        file.write_text(yaml.safe_dump(content))
        return file


@dataclass
class Controllers:
    """The controller of Deployments, the scheduler of pods and the kubelet.

    Attributes:
        makes_pods: whether Deployments get pods, as where there is room in the quota.
        loading: Deployments whose new pods do not get ready.
        draining: pods that do not end yet.
    """

    api: Api
    makes_pods: bool = True
    loading: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, deployments: Sequence[str]) -> None:
        """Works until it is cancelled."""
        while True:
            for name in deployments:
                await self._control(name)
            for pod in await self.pods():
                await self._care_for(pod)
            await asyncio.sleep(0.02)

    async def pods(self, deployment: str = "") -> list[Object]:
        """The pods of a Deployment, or of all."""
        selector = f"{DEPLOYMENT_LABEL}={deployment}" if deployment else DEPLOYMENT_LABEL
        found = await self.api.call("GET", f"{pods_path()}?labelSelector={selector}")
        return sorted(found["items"], key=_number)

    async def names(self, deployment: str) -> list[str]:
        """Names of the pods of a Deployment that are not being deleted, oldest first."""
        return [each["metadata"]["name"] for each in await self.pods(deployment) if _stays(each)]

    async def replicas(self, deployment: str) -> int:
        """The size that a Deployment is to have."""
        found = await self.api.call("GET", scale_path(deployment))
        return int(found["spec"].get("replicas", 0))

    async def _control(self, name: str) -> None:
        deployment = await self.api.call("GET", f"{deployments_path()}/{name}")
        active = [each for each in await self.pods(name) if _stays(each)]
        wanted = deployment["spec"]["replicas"]
        if len(active) < wanted and self.makes_pods:
            await self._make_pod(name, deployment["spec"]["template"])
        elif len(active) > wanted:
            first = min(active, key=_ends_first)["metadata"]["name"]
            await self.api.call("DELETE", f"{pods_path()}/{first}?gracePeriodSeconds=30")

    async def _make_pod(self, name: str, template: Object) -> None:
        labels = {**template["metadata"]["labels"], "pod-template-hash": "5d9c"}
        metadata = {"name": f"{name}-5d9c-{next(self._numbers)}", "labels": labels}
        spec = {**template["spec"], "nodeName": "node-1"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        made = await self.api.call("POST", pods_path(), pod)
        assert made["kind"] == "Pod", made

    async def _care_for(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"{pods_path()}/{metadata['name']}"
        if not _stays(pod):
            if metadata["name"] not in self.draining:
                await self.api.call("DELETE", f"{path}?gracePeriodSeconds=0")
            return
        is_ready = metadata["labels"][DEPLOYMENT_LABEL] not in self.loading
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        if is_ready and not _is_ready(pod):
            await self.api.call("PATCH", f"{path}/status", {"status": status})


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _stays(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def _is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" for each in pod["status"].get("conditions", ()))


def _ends_first(pod: Object) -> tuple[bool, bool, int, int]:
    """What Kubernetes' ReplicaSet controller compares: readiness, cost, age."""
    cost = int(pod["metadata"].get("annotations", {}).get(COST, "0"))
    return pod["status"]["phase"] == "Running", _is_ready(pod), cost, -_number(pod)


def pods_path() -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/pods"


def deployments_path() -> str:
    return f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"


def scale_path(deployment: str) -> str:
    return f"{deployments_path()}/{deployment}/scale"


@dataclass
class Stage:
    """A cluster with the chart's workers in it.

    Attributes:
        environment: that of the chart's launcher.
    """

    controllers: Controllers
    certificate: Path | None
    environment: Mapping[str, str]

    def api(self, token: str) -> Api:
        return Api(self.controllers.api.url, token, self.certificate)


@cache
def chart() -> str:
    """The chart's manifests with a launcher."""
    return render({"launcher": {"enabled": True, "groups": GROUPS}})


@asynccontextmanager
async def cluster(kind: str, folder: Path) -> AsyncIterator[Stage]:
    """A cluster with what the chart makes for the launcher.

    Args:
        kind: `twin` or `real`.
    """
    if kind == "real":
        async with (
            api_server(USERS, folder) as (url, certificate),
            _staged(url, certificate) as stage,
        ):
            yield stage
    else:
        async with kubernetes_twin(USERS) as (_, url), _staged(url, None) as stage:
            yield stage


@asynccontextmanager
async def _staged(url: str, certificate: Path | None) -> AsyncIterator[Stage]:
    admin = Api(url, ADMIN, certificate)
    manifests = list(yaml.safe_load_all(chart()))
    names: list[str] = []
    environment: dict[str, str] = {}
    for each in manifests:
        name = each["metadata"]["name"]
        if each["kind"] in ("Role", "RoleBinding"):
            rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
            made = await admin.call("POST", f"{rights}/{each['kind'].lower()}s", each)
            assert made["kind"] == each["kind"], made
        if each["kind"] == "Deployment" and name == "kvmesh-launcher":
            (container,) = each["spec"]["template"]["spec"]["containers"]
            environment = {one["name"]: one.get("value", "") for one in container["env"]}
        if each["kind"] == "Deployment" and name.startswith(("kvmesh-prefill", "kvmesh-decode")):
            names.append(name)
            for container in each["spec"]["template"]["spec"]["containers"]:
                for probe in ("startupProbe", "readinessProbe"):
                    container.pop(probe)  # over gRPC, which old servers do not know
            made = await admin.call("POST", deployments_path(), each)
            assert made["kind"] == "Deployment", made
    controllers = Controllers(admin)
    running = asyncio.create_task(controllers.run(names))
    try:
        yield Stage(controllers, certificate, environment)
        assert not running.done(), running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def launcher(
    stage: Stage, folder: Path, token: str = LAUNCHER
) -> AsyncIterator[RemoteLauncher]:
    """The launcher's service, configured as by the chart."""
    ours = ("KVMESH_KUBERNETES__DEPLOYMENTS", "KVMESH_KUBERNETES__MODEL")
    environ = {name: stage.environment[name] for name in ours}
    environ["KVMESH_KUBERNETES__NAMESPACE"] = NAMESPACE
    environ["KVMESH_KUBERNETES__KUBECONFIG"] = str(stage.api(token).kubeconfig(folder))
    config = load_config(LauncherConfig, environ=environ)
    async with serving("launcher", config, build) as context:
        remote = RemoteLauncher(f"127.0.0.1:{context.port}", MeshAccess())
        try:
            yield remote
        finally:
            await remote.close()
