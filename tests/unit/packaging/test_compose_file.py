from __future__ import annotations

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import COMMANDS
from kvmesh.core.config import load_config, options_of
from kvmesh.runtime.app import ServerConfig
from tests.unit.packaging.compose_file import (
    COMPOSE_FILE,
    CONFIGS,
    KUBERNETES_ALONE,
    ROOT,
    TARGETS,
    compose_services,
    environment_of,
    interpolated,
    kvmesh_services,
    service_of,
)

# Variables of OpenMP and gRPC, not of ours.
FOREIGN_VARIABLES = {"OMP_NUM_THREADS", "GRPC_VERBOSITY"}

PORTS = {
    "gateway": ["${KVMESH_PORT:-8000}:8000"],
    "gateway-1": ["${KVMESH_SECOND_PORT:-8001}:8000"],
}
"""What the host can reach."""


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    schema = ("--builtin-schema", "vendor.compose-spec")
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_the_file_follows_the_compose_specification() -> None:
    done = validate(COMPOSE_FILE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_validation_notices_a_misspelt_key(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(COMPOSE_FILE.read_text().replace("healthcheck:", "healthchek:", 1))
    done = validate(wrong)
    assert done.returncode == 1
    assert "healthchek" in done.stdout


def test_every_service_is_part_of_the_stack() -> None:
    targets = {service["build"]["target"] for service in kvmesh_services().values()}
    folders = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    assert targets == {name for name, each in TARGETS.items() if each not in KUBERNETES_ALONE}
    assert folders == set(CONFIGS)


@pytest.mark.parametrize("name", kvmesh_services())
def test_its_environment_is_a_valid_config(name: str) -> None:
    service = kvmesh_services()[name]
    config_class = CONFIGS[service_of(service)]
    environment = environment_of(service)
    known = {option.env for option in options_of(config_class)}
    assert set(environment) - FOREIGN_VARIABLES <= known
    load_config(config_class, environ=environment)  # raises where a value has the wrong type


def test_workers_with_vllm_run_images_of_their_own_in_a_profile() -> None:
    for name, service in kvmesh_services().items():
        target = service["build"]["target"]
        assert service["image"] == f"kvmesh-{target}"
        is_vllm = target.endswith("-vllm")
        assert ("vllm" in service.get("profiles", ())) == is_vllm, name


@pytest.mark.parametrize("name", kvmesh_services())
def test_its_peers_are_services_at_the_port_they_listen_on(name: str) -> None:
    services = kvmesh_services()
    for variable, value in environment_of(services[name]).items():
        if "TRACE" in variable:
            continue  # the collector's, of a profile
        if variable.endswith(("__TARGET", "__TARGETS", "_TARGET", "_TARGETS")):
            for target in value.split(","):
                peer, _, port = target.partition(":")
                assert environment_of(services[peer])["KVMESH_SERVER__PORT"] == port, variable
        if variable == "KVMESH_REDIS__URL":
            assert value.startswith("redis://redis:6379/")


def test_gateways_count_what_tenants_used_where_the_mesh_keeps_its_state() -> None:
    services = kvmesh_services()
    urls = {
        name: load_config(CONFIGS[name], environ=environment_of(services[name])).redis.url
        for name in ("gateway", "scheduler", "kvmanager")
    }
    assert set(urls.values()) == {"redis://redis:6379/0"}, urls


@pytest.mark.parametrize("name", kvmesh_services())
def test_it_listens_for_others_and_says_under_which_name(name: str) -> None:
    service = kvmesh_services()[name]
    environment = environment_of(service)
    assert environment["KVMESH_SERVER__HOST"] == "0.0.0.0"
    if service_of(service) in {"prefill", "decode"}:
        assert environment["KVMESH_WORKER__ID"] == name
        assert environment["KVMESH_SERVER__ADVERTISE_HOST"] == name


@pytest.mark.parametrize("name", kvmesh_services())
def test_its_health_check_asks_its_own_port(name: str) -> None:
    service = kvmesh_services()[name]
    kind, program, dash_m, module, command, target = service["healthcheck"]["test"]
    assert (kind, program, dash_m, module) == ("CMD", "python", "-m", "kvmesh.cli")
    assert command in COMMANDS
    assert target == f"127.0.0.1:{environment_of(service)['KVMESH_SERVER__PORT']}"


@pytest.mark.parametrize("name", kvmesh_services())
def test_it_may_drain_before_it_is_killed(name: str) -> None:
    grace = re.fullmatch(r"(\d+)s", kvmesh_services()[name]["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) > ServerConfig().drain_s


def test_dependencies_are_healthy_services_without_a_circle() -> None:
    services = compose_services()
    graph: dict[str, list[str]] = {}
    for name, service in services.items():
        needs = service.get("depends_on", {})
        graph[name] = list(needs)
        for dependency, how in needs.items():
            assert how == {"condition": "service_healthy"}, f"{name} -> {dependency}"
            assert services[dependency]["healthcheck"]["test"], f"{name} -> {dependency}"
    order = list(TopologicalSorter(graph).static_order())
    assert order[:2] == ["secrets", "redis"]
    assert set(order[-2:]) == set(PORTS)


@pytest.mark.parametrize("name", kvmesh_services())
def test_it_has_no_rights(name: str) -> None:
    service = kvmesh_services()[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(volume.endswith(":ro") for volume in service.get("volumes", []))


@pytest.mark.parametrize("name", compose_services())
def test_nothing_reaches_the_host(name: str) -> None:
    service = compose_services()[name]
    for key in ("privileged", "cap_add", "pid", "ipc", "devices"):
        assert key not in service
    assert service.get("network_mode", "none") == "none"
    assert service.get("user", "999:999") == ("0:0" if name == "secrets" else "999:999")
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service.get("ports", []) == PORTS.get(name, [])


def test_one_model_is_served_under_one_name() -> None:
    names, folders = set(), set()
    for service in kvmesh_services().values():
        environment = environment_of(service)
        for variable in ("KVMESH_ENGINE__MODEL_NAME", "KVMESH_MODEL__SERVED_NAME"):
            names |= {environment[variable]} if variable in environment else set()
        for volume in service.get("volumes", []):
            folder, mounted, _ = interpolated(volume).split(":")
            if mounted.startswith("/secrets/"):
                continue
            if mounted == "/adapters":
                assert "KVMESH_ENGINE__LORA" in environment
                continue
            assert mounted in {
                environment.get("KVMESH_ENGINE__MODEL"),
                environment.get("KVMESH_MODEL__PATH"),
            }
            folders.add(folder)
    assert folders == {"./models/pydoc-6m"}
    assert names == {"pydoc-6m"}
