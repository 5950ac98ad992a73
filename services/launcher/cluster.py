"""The calls to the Kubernetes API that the launcher makes, through the official client.

Its service account needs the rights to exactly these calls.
Tests: tests/integration/test_kubernetes.py.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client, config

from kvmesh.core.errors import ConfigError
from kvmesh.core.launch import LaunchError
from services.launcher.config import KubernetesConfig
from services.launcher.pods import Pod

DEPLOYMENT_LABEL = "kvmesh/deployment"
"""Label of the workers' pods with the name of their Deployment."""
COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
REVISION_LABEL = "pod-template-hash"

ANSWER_S = 3.0
"""Seconds that the API server has to answer."""

_MERGE_PATCH = "application/merge-patch+json"
_ENDED = ("Succeeded", "Failed")

AnswerT = TypeVar("AnswerT")


class ConflictError(LaunchError):
    """Somebody else changed the object since it was read."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a Deployment.

    Attributes:
        version: resource version; a change is refused if the size was changed since.
    """

    replicas: int
    version: str


async def open_cluster(settings: KubernetesConfig) -> Cluster:
    """Opens the connection to the API server.

    Raises:
        ConfigError: the kubeconfig cannot be used, or this pod has no service account.
    """
    configuration = client.Configuration()
    try:
        if settings.kubeconfig:
            await config.load_kube_config(
                settings.kubeconfig, client_configuration=configuration, persist_config=False
            )
        else:
            config.load_incluster_config(configuration)
    except (config.ConfigException, OSError) as error:
        where = settings.kubeconfig or "the service account of this pod"
        text = f"kubernetes.kubeconfig: {where} cannot be used: {error}"
        raise ConfigError(text) from error
    return Cluster(client.ApiClient(configuration), settings.namespace)


class Cluster:
    """One namespace of a Kubernetes cluster.

    Every method raises LaunchError if the API server refuses the call or does not answer.
    """

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self._core = client.CoreV1Api(api)
        self._apps = client.AppsV1Api(api)
        self._namespace = namespace

    async def pods(self) -> list[Pod]:
        """The pods of all Deployments of workers, by name."""
        answer = await _asked(
            self._core.list_namespaced_pod(
                self._namespace, label_selector=DEPLOYMENT_LABEL, _request_timeout=ANSWER_S
            )
        )
        return sorted((_pod(each) for each in answer.items), key=lambda pod: pod.name)

    async def scale(self, deployment: str) -> Scale:
        """The size that a Deployment is to have."""
        answer = await _asked(
            self._apps.read_namespaced_deployment_scale(
                deployment, self._namespace, _request_timeout=ANSWER_S
            )
        )
        return Scale(answer.spec.replicas or 0, answer.metadata.resource_version)

    async def set_scale(self, deployment: str, scale: Scale) -> None:
        """Changes the size of a Deployment.

        Raises:
            ConflictError: the Deployment was changed since `scale.version`.
        """
        body = client.V1Scale(
            api_version="autoscaling/v1",
            kind="Scale",
            metadata=client.V1ObjectMeta(
                name=deployment, namespace=self._namespace, resource_version=scale.version
            ),
            spec=client.V1ScaleSpec(replicas=scale.replicas),
        )
        await _asked(
            self._apps.replace_namespaced_deployment_scale(
                deployment, self._namespace, body, _request_timeout=ANSWER_S
            )
        )

    async def set_deletion_cost(self, pod: str, cost: int | None) -> None:
        """Sets the deletion cost of a pod; None removes it."""
        text = None if cost is None else str(cost)
        await _asked(
            self._core.patch_namespaced_pod(
                pod,
                self._namespace,
                {"metadata": {"annotations": {COST_ANNOTATION: text}}},
                _content_type=_MERGE_PATCH,
                _request_timeout=ANSWER_S,
            )
        )

    async def delete_pod(self, pod: str, grace_s: int) -> None:
        """Deletes a pod; its Deployment makes another one."""
        await _asked(
            self._core.delete_namespaced_pod(
                pod, self._namespace, grace_period_seconds=grace_s, _request_timeout=ANSWER_S
            )
        )

    async def close(self) -> None:
        """Closes the connection."""
        await self._api.close()


async def _asked(call: Awaitable[AnswerT]) -> AnswerT:
    try:
        return await call
    except client.ApiException as error:
        kind = ConflictError if error.status == 409 else LaunchError
        raise kind(f"the API server answers {error.status}: {_message(error)}") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        text = f"the API server does not answer: {type(error).__name__} {error}"
        raise LaunchError(text) from error


def _message(error: Any) -> str:
    """The text in the API server's answer."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def _pod(found: Any) -> Pod:
    metadata, status = found.metadata, found.status
    labels = metadata.labels or {}
    phase = status.phase or "Pending"
    conditions = {each.type: each.status for each in status.conditions or ()}
    return Pod(
        name=metadata.name,
        deployment=labels.get(DEPLOYMENT_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        is_active=metadata.deletion_timestamp is None and phase not in _ENDED,
        is_assigned=bool(found.spec.node_name),
        phase=phase,
        is_ready=conditions.get("Ready") == "True",
        deletion_cost=_cost((metadata.annotations or {}).get(COST_ANNOTATION, "0")),
    )


def _cost(text: str) -> int:
    """A deletion cost; 0 where Kubernetes would not take the text as one."""
    try:
        return int(text)
    except ValueError:
        return 0
