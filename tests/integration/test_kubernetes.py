"""The launcher for Kubernetes over gRPC, against the twin of an API server or a real one.

With KUBEBUILDER_ASSETS, a folder that has `etcd` and `kube-apiserver`, all tests run with both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.launch import Launched, LaunchError, LaunchSpec
from kvmesh.core.types import Role, WorkerId
from services.launcher import workers as workers_module
from services.launcher.cluster import Cluster, Scale, open_cluster
from services.launcher.config import KubernetesConfig
from services.launcher.pods import Pod, in_the_way
from tests.kubernetes.api_server import ASSETS
from tests.kubernetes.stage import (
    COST,
    DEPLOYMENT_LABEL,
    LAUNCHER,
    NAMESPACE,
    STRANGER,
    Object,
    Stage,
    cluster,
    deployments_path,
    launcher,
    pods_path,
    scale_path,
)
from tests.waiting import until

DECODE, PREFILL = LaunchSpec(Role.DECODE), LaunchSpec(Role.PREFILL)
CHAT = LaunchSpec(Role.DECODE, "chat", "/models/two")


@pytest.fixture(params=["twin", *(["real"] if ASSETS else [])])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    async with cluster(request.param, tmp_path) as found:
        yield found


def scale_of(deployment: str, replicas: int, **metadata: str) -> Object:
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {"name": deployment, "namespace": NAMESPACE, **metadata},
        "spec": {"replicas": replicas},
    }


async def ready(stage: Stage, deployment: str, count: int) -> list[str]:
    """Waits until a Deployment has so many ready pods."""

    async def is_so() -> bool:
        pods = await stage.controllers.pods(deployment)
        return len(pods) == count and all(each["status"].get("conditions") for each in pods)

    await until(is_so, f"{count} ready pods of {deployment}")
    return await stage.controllers.names(deployment)


async def test_workers_come_and_the_one_that_is_named_goes(stage: Stage, tmp_path: Path) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    async with launcher(stage, tmp_path) as remote:
        started = [await remote.start(DECODE) for _ in range(2)]
        kept = await remote.list()
        assert [each.worker_id for each in kept if each.spec == DECODE] == [first, *started]
        assert len([each for each in kept if each.spec == PREFILL]) == 1
        await ready(stage, "kvmesh-decode", 3)
        await remote.stop(started[0])
        assert await stage.controllers.names("kvmesh-decode") == [first, started[1]]
        assert await stage.controllers.replicas("kvmesh-decode") == 2
        assert started[0] not in [each.worker_id for each in await remote.list()]


async def test_a_group_has_deployments_of_its_own(stage: Stage, tmp_path: Path) -> None:
    async with launcher(stage, tmp_path) as remote:
        name = await remote.start(LaunchSpec(CHAT.role, "chat", "/models/two", "pydoc-6m"))
        assert name.startswith("kvmesh-decode-chat-")
        assert Launched(name, CHAT) in await remote.list()
        with pytest.raises(LaunchError, match="no Deployment has spare workers"):
            await remote.start(LaunchSpec(Role.SPARE))
        with pytest.raises(LaunchError, match="serve 'pydoc-6m', not 'other'"):
            await remote.start(LaunchSpec(Role.DECODE, model="other"))


async def test_a_worker_waits_for_those_that_kubernetes_would_end_first(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []

    def noted(pod: Pod, active: Iterable[Pod], replicas: int) -> str:
        reasons.append(in_the_way(pod, active, replicas))
        return reasons[-1]

    monkeypatch.setattr(workers_module, "in_the_way", noted)
    (first,) = await ready(stage, "kvmesh-decode", 1)
    stage.controllers.loading.add("kvmesh-decode")
    async with launcher(stage, tmp_path) as remote:
        second = await remote.start(DECODE)
        stopping = asyncio.create_task(remote.stop(WorkerId(first)))
        await until(lambda: len(reasons) > 3, "looks that change nothing")
        assert set(reasons) == {f"{second} would end first, not being ready"}
        assert await stage.controllers.names("kvmesh-decode") == [first, second]
        stage.controllers.loading.clear()
        await stopping
        assert await stage.controllers.names("kvmesh-decode") == [second]


async def test_one_that_loads_goes_before_those_that_serve(stage: Stage, tmp_path: Path) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    stage.controllers.loading.add("kvmesh-decode")
    async with launcher(stage, tmp_path) as remote:
        await remote.stop(await remote.start(DECODE))
    assert await stage.controllers.names("kvmesh-decode") == [first]


async def test_a_stop_ends_when_the_worker_has_drained(stage: Stage, tmp_path: Path) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    stage.controllers.draining.add(first)
    async with launcher(stage, tmp_path) as remote:
        stopping = asyncio.create_task(remote.stop(WorkerId(first)))

        async def is_leaving() -> bool:
            return await stage.controllers.names("kvmesh-decode") == []

        await until(is_leaving)
        assert CHAT in [each.spec for each in await remote.list()], "others are seen meanwhile"
        assert not stopping.done()
        stage.controllers.draining.clear()
        await stopping


async def test_a_killed_worker_is_replaced_by_another(stage: Stage, tmp_path: Path) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    async with launcher(stage, tmp_path) as remote:
        name, kept = await asyncio.gather(remote.restart(WorkerId(first)), remote.list())
        decoding = [each for each in kept if each.spec == DECODE]
        assert len(decoding) == 1, "one is seen in every moment"
        assert await stage.controllers.names("kvmesh-decode") == [name] != [first]
        assert await stage.controllers.replicas("kvmesh-decode") == 1
        for do in (remote.stop, remote.restart):
            with pytest.raises(LaunchError, match=f"{first} is no worker of this cluster"):
                await do(WorkerId(first))


async def test_a_size_that_somebody_else_changed_is_read_again(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    set_scale, num_refused = Cluster.set_scale, 0

    async def late(self: Cluster, deployment: str, scale: Scale) -> None:
        nonlocal num_refused
        if not num_refused:
            num_refused = 1
            changed = await stage.controllers.api.call(
                "PUT", scale_path(deployment), scale_of(deployment, 2)
            )
            assert changed["spec"]["replicas"] == 2, changed
        await set_scale(self, deployment, scale)

    monkeypatch.setattr(Cluster, "set_scale", late)
    async with launcher(stage, tmp_path) as remote:
        name = await remote.start(DECODE)
    names = await ready(stage, "kvmesh-decode", 3)
    assert names[-1] == name
    assert names[0] == first


async def test_a_size_for_which_no_pod_comes_is_taken_back(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "START_S", 0.5)
    await ready(stage, "kvmesh-decode", 1)
    stage.controllers.makes_pods = False
    async with launcher(stage, tmp_path) as remote:
        with pytest.raises(LaunchError, match=r"kvmesh-decode got no pod .* says why"):
            await remote.start(DECODE)
    assert await stage.controllers.replicas("kvmesh-decode") == 1


async def test_a_mark_of_an_attempt_that_failed_ends_nobody(stage: Stage, tmp_path: Path) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    mark = {"metadata": {"annotations": {COST: str(-(2**31))}}}
    async with launcher(stage, tmp_path) as remote:
        second = await remote.start(DECODE)
        await ready(stage, "kvmesh-decode", 2)
        await stage.controllers.api.call("PATCH", f"{pods_path()}/{second}", mark)
        await remote.stop(WorkerId(first))
    (pod,) = await stage.controllers.pods("kvmesh-decode")
    assert pod["metadata"]["name"] == second
    assert COST not in pod["metadata"].get("annotations", {})


async def test_the_twin_refuses_what_a_real_server_refuses(stage: Stage) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    api, size, pod = stage.controllers.api, scale_path("kvmesh-decode"), f"{pods_path()}/{first}"
    old = {"metadata": {"resourceVersion": "1"}}
    no_place = {**scale_of("kvmesh-decode", 2), "metadata": {"name": "kvmesh-decode"}}
    tried: list[tuple[str, str, Object | None, int, str]] = [
        ("PUT", size, scale_of("kvmesh-decode", 2, resourceVersion="1"), 409, "modified"),
        ("PUT", size, scale_of("kvmesh-decode", -1), 422, "greater than or equal to 0"),
        ("PUT", size, no_place, 422, "metadata.namespace: Required value"),
        ("GET", scale_path("none"), None, 404, '"none" not found'),
        ("PATCH", pod, old, 409, "modified"),
        ("PATCH", f"{pod}x", {"metadata": {"labels": {"a": "b"}}}, 404, "not found"),
        ("DELETE", f"{pod}x", None, 404, "not found"),
    ]
    for method, path, body, code, message in tried:
        answer = await api.call(method, path, body)
        assert (answer["kind"], answer["code"]) == ("Status", code), (method, path, answer)
        assert message in answer["message"]
    stranger = await stage.api(STRANGER).call("GET", pods_path())
    assert (stranger["reason"], stranger["code"]) == ("Forbidden", 403)
    assert "cannot list resource" in stranger["message"]
    nobody = await stage.api("nobody-s-token").call("GET", pods_path())
    assert (nobody["message"], nobody["code"]) == ("Unauthorized", 401)
    size_now = await api.call("GET", size)
    assert size_now["spec"] == {"replicas": 1}, "nothing of this had an effect"
    selector = size_now["status"]["selector"]
    assert f"{DEPLOYMENT_LABEL}=kvmesh-decode" in selector.split(",")


async def test_the_service_account_may_do_nothing_else(stage: Stage, tmp_path: Path) -> None:
    (first,) = await ready(stage, "kvmesh-decode", 1)
    api, pod = stage.api(LAUNCHER), {"metadata": {"labels": {"a": "b"}}}
    tried = {
        f"GET {pods_path()}/{first}": None,
        f"POST {pods_path()}": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "mine"}},
        f"PATCH {pods_path()}/{first}/status": pod,
        f"GET {deployments_path()}/kvmesh-decode": None,
        f"GET {scale_path('kvmesh-gateway')}": None,
        f"GET {pods_path().replace(NAMESPACE, 'kube-system')}": None,
    }
    for call, body in tried.items():
        method, path = call.split()
        answer = await api.call(method, path, body)
        assert (answer["kind"], answer.get("code")) == ("Status", 403), call
    async with launcher(stage, tmp_path, STRANGER) as remote:
        with pytest.raises(LaunchError, match=r"answers 403: .* cannot list resource"):
            await remote.list()
    async with launcher(stage, tmp_path, "nobody-s-token") as remote:
        with pytest.raises(LaunchError, match="answers 401"):
            await remote.start(DECODE)


async def test_an_api_server_that_does_not_answer_is_said(stage: Stage, tmp_path: Path) -> None:
    file = stage.api(LAUNCHER).kubeconfig(tmp_path)
    file.write_text(file.read_text().replace(stage.controllers.api.url, "http://127.0.0.1:9"))
    found = await open_cluster(KubernetesConfig(kubeconfig=str(file)))
    with pytest.raises(LaunchError, match="the API server does not answer"):
        await found.pods()
    await found.close()


async def test_without_an_account_the_service_does_not_start(tmp_path: Path) -> None:
    for file in ("", str(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"kubernetes\.kubeconfig: .* cannot be used"):
            await open_cluster(KubernetesConfig(kubeconfig=file))
