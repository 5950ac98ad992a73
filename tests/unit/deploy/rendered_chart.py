"""The Helm chart rendered, with the values and the helpers of the tests in this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from scripts.render_manifests import render
from tests.unit.packaging.compose_file import CONFIGS, KUBERNETES_ALONE, VLLM_ALONE

if importlib.util.find_spec("go_template") is None:
    pytest.skip("no library for Go's templates on this machine", allow_module_level=True)

KUBERNETES = ("1.31", "1.37")
FOREIGN_VARIABLES = {
    "POD_NAME",
    "POD_NAMESPACE",
    "POD_IP",
    "LEADER_NAME",
    "HOST_INDEX",
    "OMP_NUM_THREADS",
    "GRPC_VERBOSITY",
}
AUTOSCALED: dict[str, Any] = {
    name: {"autoscaling": {"enabled": True}} for name in ("gateway", "prefill", "decode")
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "autoscaled": AUTOSCALED,
    "secured": {
        "mesh": {"secret": "own-mesh"},
        "tls": {"secret": "certificates"},
        "admin": {"secret": "admin-token"},
        "apiKeys": {"secret": "keys"},
        "tenants": {"secret": "tenants"},
        "tracing": {"collector": "collector.monitoring:4317"},
    },
    "gpus": {
        "engine": {"device": "cuda", "dtype": "bfloat16", "numBlocks": 2_000_000},
        "image": {"registry": "registry.example/", "pullSecrets": [{"name": "registry"}]},
        "model": {"name": "big", "path": "/models/big", "claim": "checkpoints"},
        "prefill": {"gpus": 1, "nodeSelector": {"pool": "gpu"}},
        "decode": {
            "gpus": 2,
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "env": {"KVMESH_ENGINE__GROWTH_TOKENS": 128, "KVMESH_ENGINE__NUM_THREADS": 2},
        },
    },
    "vllm": {"engine": {"kind": "vllm", "blockSize": 32}},
    "vllm-devices": {
        "engine": {"kind": "vllm", "blockSize": 16, "device": "cuda", "tensorParallel": 2},
        "prefill": {"gpus": 2},
        "decode": {"gpus": 2},
    },
    "hosts": {
        "engine": {
            "kind": "vllm",
            "blockSize": 16,
            "device": "cuda",
            "tensorParallel": 8,
            "pipelineParallel": 2,
            "hosts": 2,
        },
        "model": {"path": "/models/big", "claim": "checkpoints"},
        "prefill": {"gpus": 8, "nodeSelector": {"pool": "gpu"}},
        "decode": {"gpus": 8, "autoscaling": {"enabled": True}},
        "spare": {"replicas": 1, "gpus": 8},
        "tls": {"secret": "certificates"},
        "admin": {"secret": "admin-token"},
    },
    "adapters": {
        "engine": {
            "kind": "vllm",
            "blockSize": 32,
            "tensorParallel": 2,
            "pipelineParallel": 2,
            "lora": "sql=/models/sql,chat=/models/chat",
            "maxLoras": 4,
            "maxLoraRank": 64,
        },
        "model": {"claim": "checkpoints"},
    },
    "launched": {
        "launcher": {
            "enabled": True,
            "groups": [{"name": "two", "scenario": "chat", "checkpoint": "/models/two"}],
        },
        "prefill": {"gpus": 1},
        "spare": {"replicas": 1, "gpus": 1},
        "tls": {"secret": "certificates"},
    },
    "spares": {"spare": {"replicas": 2, "empty": True}},
    "own-redis": {
        "redis": {"enabled": False, "url": "rediss://redis.data:6379/0", "secret": "redis"},
        "networkPolicy": {"enabled": False},
        "scheduler": {"replicas": 1},
    },
}

Manifest = dict[str, Any]

GROUP = "LeaderWorkerSet"


@cache
def text_of(values: str) -> str:
    return render(VALUES[values])


def rendered(values: str) -> list[Manifest]:
    return list(yaml.safe_load_all(text_of(values)))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Deployments and StatefulSets by component, and both kinds of pods of groups."""
    found = of_kind(manifests, "Deployment", "StatefulSet")
    found += [each for group in of_kind(manifests, GROUP) for each in sets_of(group)]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}


def sets_of(group: Manifest) -> list[Manifest]:
    """The StatefulSets that a LeaderWorkerSet's controller makes of its leaders and other pods."""
    template = group["spec"]["leaderWorkerTemplate"]
    found = []
    for pod in (template["leaderTemplate"], template["workerTemplate"]):
        labels = pod["metadata"]["labels"]
        spec = {
            "serviceName": group["metadata"]["name"],
            "selector": {"matchLabels": labels},
            "template": pod,
        }
        metadata = {"name": group["metadata"]["name"], "labels": labels}
        found.append(
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}
        )
    return found


def expected(manifests: list[Manifest]) -> set[str]:
    """Components that are to be there."""
    has_launcher = bool(of_kind(manifests, "Role"))
    others = {name for name in workloads(manifests) if name == "spare" or name.endswith("-ranks")}
    return set(CONFIGS) - VLLM_ALONE - (set() if has_launcher else KUBERNETES_ALONE) | others


def service_of(name: str) -> str:
    """The service that a component is; a spare decodes, or does what it is assigned."""
    if name.endswith("-ranks"):
        return "ranks"
    return "decode" if name == "spare" else name


def ours(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Name, pod and container of each workload that runs an image of ours."""
    for name, workload in workloads(manifests).items():
        pod = workload["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        if service_of(name) in CONFIGS:
            yield name, pod, container


def environment(container: Manifest) -> dict[str, str]:
    found = {each["name"]: each.get("value", "from elsewhere") for each in container["env"]}
    return {name: value.replace("$(HOST_INDEX)", "1") for name, value in found.items()}


def ports(container: Manifest) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container["ports"]}


def labels_of(workload: Manifest) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels
