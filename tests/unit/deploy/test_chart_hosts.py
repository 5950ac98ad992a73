"""The chart with workers whose ranks are on several hosts."""

from __future__ import annotations

from kvmesh.core.config import load_config
from scripts.render_manifests import RELEASE
from tests.unit.deploy.rendered_chart import (
    GROUP,
    environment,
    of_kind,
    rendered,
    sets_of,
)
from tests.unit.packaging.compose_file import CONFIGS


def test_workers_on_several_hosts_are_groups_whose_ranks_find_their_leader() -> None:
    manifests = rendered("hosts")
    groups = {each["metadata"]["name"]: each for each in of_kind(manifests, GROUP)}
    assert set(groups) == {f"{RELEASE}-{name}" for name in ("prefill", "decode", "spare")}
    for name, group in groups.items():
        assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        # https://github.com/kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go
        assert group["spec"].keys() <= {"replicas", "leaderWorkerTemplate", "startupPolicy"}
        assert ("replicas" in group["spec"]) is not name.endswith("decode"), "else it scales itself"
        template = group["spec"]["leaderWorkerTemplate"]
        assert template.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
        leader, other = (each["spec"]["template"]["spec"] for each in sets_of(group))
        (told,) = leader["containers"]
        (ranks,) = other["containers"]
        config = load_config(CONFIGS["decode"], environ=environment(told))
        joined = load_config(CONFIGS["ranks"], environ=environment(ranks))
        assert config.engine.hosts == template["size"] == 2
        assert joined.ranks.leader == f"$(LEADER_NAME).{name}:{config.engine.ranks_port}"
        assert joined.ranks.model == config.engine.model
        assert joined.ranks.device == config.engine.device
        assert (joined.ranks.tls, joined.server.secret_file) == (
            config.data.tls,
            config.server.secret_file,
        )
        sources = {each["name"]: each.get("valueFrom") for each in ranks["env"]}
        paths = [sources[each]["fieldRef"]["fieldPath"] for each in ("LEADER_NAME", "HOST_INDEX")]
        assert paths == [
            "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']",
            "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
        ]
        assert ranks["resources"]["limits"]["nvidia.com/gpu"] == 8
    (scaler,) = of_kind(manifests, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": GROUP,
        "name": f"{RELEASE}-decode",
    }


def test_ranks_of_a_worker_reach_each_other_at_any_port_and_nobody_else_does() -> None:
    policies = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"]
        for each in of_kind(rendered("hosts"), "NetworkPolicy")
    }
    for name in ("prefill", "decode", "spare"):
        for owner, callers in (
            (name, {f"{name}-ranks"}),
            (f"{name}-ranks", {name, f"{name}-ranks"}),
        ):
            at_any_port = [
                source["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
                for rule in policies[owner]["ingress"]
                if "ports" not in rule
                for source in rule["from"]
            ]
            assert set(at_any_port) == callers
