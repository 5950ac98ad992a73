"""The Helm chart, rendered as helm renders it, against Kubernetes' schemas and our own configs."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest

from kvmesh.core.config import load_config, options_of
from kvmesh.core.types import Role
from scripts.render_manifests import CHART, HELM_ALONE, MANIFESTS, RELEASE
from services.launcher.cluster import DEPLOYMENT_LABEL
from services.launcher.config import LauncherConfig
from services.launcher.deployments import read_deployments
from tests.unit.deploy.metric_names import known_metrics
from tests.unit.deploy.rendered_chart import (
    FOREIGN_VARIABLES,
    GROUP,
    KUBERNETES,
    VALUES,
    Manifest,
    environment,
    expected,
    labels_of,
    of_kind,
    ours,
    ports,
    rendered,
    service_of,
    sets_of,
    text_of,
    workloads,
)
from tests.unit.packaging.compose_file import CONFIGS, ROOT, VLLM_ALONE


@pytest.fixture(params=list(VALUES))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_follows_the_schema(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        for each in sets_of(manifest) if manifest["kind"] == GROUP else [manifest]:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_notices_a_misspelt_field() -> None:
    (deployment, *_) = rendered("defaults")
    deployment["spec"]["templat"] = deployment["spec"].pop("template")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES[-1], strict=True)


def test_names_are_unique_and_every_service_is_there(manifests: list[Manifest]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(names) == len(set(names))
    assert expected(manifests) <= set(workloads(manifests))


def test_the_plain_manifests_are_the_chart_s() -> None:
    assert MANIFESTS.read_text() == text_of("defaults"), "run `make manifests`"


def test_templates_need_no_helm() -> None:
    """What helm adds to text/template and sprig is not used, so the tests above show the truth."""
    for template in (CHART / "templates").iterdir():
        if template.name == HELM_ALONE:  # see test_helm.py
            continue
        used = re.findall(
            r"\b(include|tpl|lookup|required|\.Files|\.Capabilities)\b", template.read_text()
        )
        assert used in ([], ["include"]), template  # the word in _parts.tpl's comment


def test_environments_are_valid_configs(manifests: list[Manifest]) -> None:
    for name, _, container in ours(manifests):
        variables = environment(container)
        known = {option.env for option in options_of(CONFIGS[service_of(name)])}
        assert set(variables) - FOREIGN_VARIABLES <= known, name
        config = load_config(CONFIGS[service_of(name)], environ=variables)
        assert ports(container)["grpc"] == config.server.port
        assert ports(container)["metrics"] == config.telemetry.metrics_port
        if "data" in ports(container):
            assert ports(container)["data"] == config.worker.data_port


def test_variables_of_the_values_win_and_each_is_there_once(manifests: list[Manifest]) -> None:
    for name, _, container in ours(manifests):
        names = [each["name"] for each in container["env"]]
        assert len(names) == len(set(names)), name
        # Kubernetes expands only what was defined before.
        known: set[str] = set()
        for each in container["env"]:
            assert set(re.findall(r"\$\((\w+)\)", each.get("value", ""))) <= known, each
            known.add(each["name"])
    env = {name: environment(container) for name, _, container in ours(rendered("gpus"))}
    assert env["decode"]["KVMESH_ENGINE__NUM_THREADS"] == "2"
    assert env["prefill"]["KVMESH_ENGINE__NUM_THREADS"] == "1"
    assert env["prefill"]["KVMESH_ENGINE__NUM_BLOCKS"] == "2000000"


def test_peers_are_found_under_names_that_exist(manifests: list[Manifest]) -> None:
    services = {each["metadata"]["name"]: each for each in of_kind(manifests, "Service")}
    replicas = workloads(manifests)["scheduler"]["spec"]["replicas"]
    for name, _, container in ours(manifests):
        for variable, value in environment(container).items():
            if not variable.endswith(("__TARGET", "__TARGETS", "_TARGET", "_TARGETS")):
                continue
            if "TRACE" in variable:
                continue
            for target in value.split(","):
                host, _, port = target.partition(":")
                service = services[host.rpartition(".")[2]]
                assert int(port) in {each["port"] for each in service["spec"]["ports"]}, name
            if variable.endswith("TARGETS"):
                assert len(value.split(",")) == replicas
        advertised = environment(container).get("KVMESH_SERVER__ADVERTISE_HOST")
        if advertised == "$(POD_IP)":
            sources = {each["name"]: each.get("valueFrom") for each in container["env"]}
            assert sources["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        elif advertised is not None:
            headless = services[advertised.removeprefix("$(POD_NAME).")]
            assert headless["spec"]["clusterIP"] == "None"


def test_services_budgets_and_policies_select_pods(manifests: list[Manifest]) -> None:
    pods = {name: labels_of(each) for name, each in workloads(manifests).items()}
    for each in of_kind(manifests, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = each["spec"]
        selector = spec.get("podSelector", spec.get("selector"))
        wanted = selector.get("matchLabels", selector)
        chosen = [name for name, labels in pods.items() if wanted.items() <= labels.items()]
        assert chosen == [each["metadata"]["labels"]["app.kubernetes.io/component"]], each
    budgets = {each["metadata"]["name"] for each in of_kind(manifests, "PodDisruptionBudget")}
    assert budgets == {f"{RELEASE}-{name}" for name in expected(manifests)}


def test_pods_have_no_rights(manifests: list[Manifest]) -> None:
    for name, workload in workloads(manifests).items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is (name == "launcher")
        assert ("serviceAccountName" in pod) is (name == "launcher")
        # Kubernetes would set KVMESH_*_PORT and such, which look like options of ours.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            assert key not in pod
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= container["resources"].keys()


def test_pods_are_asked_over_grpc_and_may_drain(manifests: list[Manifest]) -> None:
    for name, pod, container in ours(manifests):
        config = load_config(CONFIGS[service_of(name)], environ=environment(container))
        wait_s = (
            container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        )
        assert pod["terminationGracePeriodSeconds"] > config.server.drain_s + wait_s
        if name == "gateway":
            assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
            assert wait_s > 0
        elif config.server.tls.ca:
            command = container["readinessProbe"]["exec"]["command"]
            assert command[:4] == ["python", "-m", "kvmesh.cli", "health"]
            assert config.server.tls.ca in command
        else:
            assert container["readinessProbe"]["grpc"] == {"port": config.server.port}
        # A drain is no reason to kill.
        assert "grpc" not in container["livenessProbe"]


def test_secrets_come_as_files_or_references(manifests: list[Manifest]) -> None:
    for _, pod, container in ours(manifests):
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"] for each in pod["volumes"]}
        assert set(mounted.values()) == volumes
        for variable, value in environment(container).items():
            if value.startswith("/etc/kvmesh/"):
                assert value.rpartition("/")[0] in mounted, variable
            assert not variable.endswith(("PASSWORD", "TOKEN")) or value == "from elsewhere"


@pytest.mark.parametrize(
    ("values", "sharing"), [("adapters", {"prefill", "decode"}), ("vllm", set()), ("gpus", set())]
)
def test_pods_of_several_ranks_have_shared_memory_up_to_their_limit(
    values: str, sharing: set[str]
) -> None:
    found: set[str] = set()
    for name, pod, container in ours(rendered(values)):
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        if "/dev/shm" in mounted:
            (volume,) = (each for each in pod["volumes"] if each["name"] == mounted["/dev/shm"])
            # Without a limit of its own, it counts to that of the container.
            assert volume["emptyDir"] == {"medium": "Memory"}
            found.add(name)
    assert found == sharing


def test_gateways_count_what_tenants_used_together(manifests: list[Manifest]) -> None:
    urls = {
        name: load_config(CONFIGS[service_of(name)], environ=environment(container)).redis
        for name, _, container in ours(manifests)
        if name in ("gateway", "scheduler", "kvmanager")
    }
    assert urls["gateway"].url.startswith(("redis://", "rediss://"))
    assert {each.url for each in urls.values()} == {urls["gateway"].url}
    assert {each.password for each in urls.values()} == {urls["gateway"].password}


def test_a_direct_stream_reaches_the_replica_that_offered_it(manifests: list[Manifest]) -> None:
    shared = {
        each["metadata"]["name"]
        for each in of_kind(manifests, "Service")
        if each["spec"].get("clusterIP") != "None"
        and any(port["name"] == "direct" for port in each["spec"]["ports"])
    }
    assert shared == {f"{RELEASE}-kvmanager"}
    (container,) = (each for name, _, each in ours(manifests) if name == "kvmanager")
    assert environment(container)["KVMESH_SERVER__ADVERTISE_HOST"] == "$(POD_IP)"


def test_autoscalers_follow_metrics_that_are_exported() -> None:
    manifests = rendered("autoscaled")
    scaled = of_kind(manifests, "HorizontalPodAutoscaler")
    assert len(scaled) == 3
    for each in scaled:
        target = each["spec"]["scaleTargetRef"]
        (workload,) = (
            found
            for found in of_kind(manifests, target["kind"])
            if found["metadata"]["name"] == target["name"]
        )
        assert "replicas" not in workload["spec"], "the autoscaler's to say"
        for metric in each["spec"]["metrics"]:
            assert metric["pods"]["metric"]["name"] in known_metrics()


@pytest.mark.parametrize("values", ["defaults", "launched", "spares"])
def test_only_those_who_call_may_call(values: str) -> None:
    """The policies allow exactly the edges that the environments make."""
    manifests = rendered(values)
    called: dict[str, set[str]] = {name: set() for name in workloads(manifests)}
    for name, _, container in ours(manifests):
        for variable, value in environment(container).items():
            if variable.endswith(("TARGET", "TARGETS")) or variable == "KVMESH_REDIS__URL":
                for peer, callers in called.items():
                    if f"{RELEASE}-{peer}:" in value:
                        callers.add(name)
    # Gateways find workers through the scheduler.
    workers = {"prefill", "decode", "spare"} & called.keys()
    for worker in workers:
        called[worker].add("gateway")
        # Workers lease blocks from each other.
        called[worker] |= workers
    for policy in of_kind(manifests, "NetworkPolicy"):
        name = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        if name == "gateway":
            continue
        first, *_ = policy["spec"]["ingress"]
        allowed = {
            each["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for each in first["from"]
        }
        assert allowed == called[name], name


def test_the_launcher_knows_every_deployment_of_workers_as_it_is() -> None:
    manifests = rendered("launched")
    assert not of_kind(manifests, "HorizontalPodAutoscaler")
    containers = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]
        for each in of_kind(manifests, "Deployment")
    }
    variables = environment(containers[f"{RELEASE}-launcher"])
    settings = load_config(LauncherConfig, environ=variables).kubernetes
    found = read_deployments(settings.deployments)
    kinds = ("-prefill", "-decode", "-spare")
    workers = [name for name in containers if any(kind in name for kind in kinds)]
    assert sorted(found) == sorted(workers)
    for name, spec in found.items():
        own = environment(containers[name])
        role = CONFIGS[service_of(spec.role.value)]
        assert load_config(role, environ=own).worker.role == spec.role.value
        assert own["KVMESH_WORKER__SCENARIO"] == spec.scenario
        assert own["KVMESH_ENGINE__MODEL"] == (spec.checkpoint or "/app/models/pydoc-6m")
        assert own["KVMESH_ENGINE__MODEL_NAME"] == settings.model
        assert own["KVMESH_SERVER__ADVERTISE_HOST"] == "$(POD_IP)"
        assert containers[name]["name"] == spec.role.value
    for each in of_kind(manifests, "Deployment"):
        name = each["metadata"]["name"]
        if name in found:
            is_spare = found[name].role is Role.SPARE
            assert ("replicas" in each["spec"]) is is_spare, "of others the launcher's to say"
            labels = each["spec"]["selector"]["matchLabels"]
            assert labels[DEPLOYMENT_LABEL] == name
            assert labels.items() <= labels_of(each).items()


def test_launched_workers_show_and_expect_one_name_in_certificates() -> None:
    """Addresses of their pods are in no certificate; by its name everybody knows the mesh."""
    for values, peer_name in (("launched", f"{RELEASE}-mesh"), ("secured", "")):
        for name, _, container in ours(rendered(values)):
            config = load_config(CONFIGS[service_of(name)], environ=environment(container))
            sections = [config.server.tls]
            if "data" in ports(container):
                sections.append(config.data.tls)
            for tls in sections:
                assert tls.cert
                assert tls.ca
                assert tls.peer_name == peer_name, name


def test_spares_are_as_many_as_the_values_say_with_or_without_a_model() -> None:
    spares = workloads(rendered("spares"))["spare"]
    assert (spares["kind"], spares["spec"]["replicas"]) == ("StatefulSet", 2)
    for values, model in (("spares", ""), ("launched", "/app/models/pydoc-6m")):
        (container,) = (each for name, _, each in ours(rendered(values)) if name == "spare")
        config = load_config(CONFIGS["decode"], environ=environment(container))
        assert (config.worker.role, config.engine.model) == ("spare", model)
    assert "spare" not in workloads(rendered("defaults"))


def test_the_launcher_alone_may_change_sizes_and_nothing_else() -> None:
    manifests = rendered("launched")
    (role,) = of_kind(manifests, "Role")
    sizes, pods = role["rules"]
    assert sizes["resources"] == ["deployments/scale"]
    assert sizes["verbs"] == ["get", "update"]
    of_workers = tuple(f"{RELEASE}-{kind}" for kind in ("prefill", "decode", "spare"))
    assert all(name.startswith(of_workers) for name in sizes["resourceNames"])
    assert (pods["resources"], pods["verbs"]) == (["pods"], ["list", "patch", "delete"])
    (binding,) = of_kind(manifests, "RoleBinding")
    (account,) = of_kind(manifests, "ServiceAccount")
    (subject,) = binding["subjects"]
    assert subject["name"] == account["metadata"]["name"]
    pod = workloads(manifests)["launcher"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == subject["name"]
    assert not of_kind(rendered("defaults"), "Role", "RoleBinding", "ServiceAccount")


def test_images_are_those_of_the_dockerfile(manifests: list[Manifest]) -> None:
    targets = set(
        re.findall(r"^FROM .* AS ([\w-]+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    )
    for name, pod, container in ours(manifests):
        engine = environment(container).get("KVMESH_ENGINE__KIND", "")
        own = f"kvmesh-{service_of(name)}"
        image = f"{own}-vllm" if engine == "vllm" or service_of(name) in VLLM_ALONE else own
        assert container["image"].removeprefix("registry.example/") == f"{image}:0.1.0"
        assert ("imagePullSecrets" in pod) == container["image"].startswith("registry.example/")
        assert image.removeprefix("kvmesh-") in targets
