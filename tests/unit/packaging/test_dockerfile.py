from __future__ import annotations

import json
import re

import pytest
import yaml

from kvmesh.core.config import load_config
from kvmesh.core.native_libraries import LIBRARIES
from kvmesh.engine.vllm_check import BLOCK_SIZE, MINOR
from tests.unit.packaging.compose_file import (
    COMPOSE_FILE,
    CONFIGS,
    CONTROL_PLANE,
    ROOT,
    TARGETS,
    VLLM_ALONE,
    Stage,
    dockerfile_stages,
    environment_of,
    kvmesh_services,
)

WITH_VLLM = [name for name in TARGETS if name.endswith("-vllm")]
WORKERS = ["prefill", "decode", *WITH_VLLM]


def stage(name: str) -> Stage:
    return dockerfile_stages()[name]


@pytest.mark.parametrize("name", TARGETS)
def test_every_service_has_a_target_that_starts_it(name: str) -> None:
    entry_points = stage(name).values("ENTRYPOINT")
    service = TARGETS[name]
    assert json.loads(entry_points[-1]) == ["python", "-m", f"services.{service}"]
    assert f"services/{service} services/{service}" in stage(name).values("COPY")


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_ends_as_a_user_without_rights(name: str) -> None:
    last = stage(name).lines
    user = stage(name).values("USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "by number, so that it can be checked"
    after = last[last.index(("USER", user)) :]
    assert not {"RUN", "COPY", "ADD"} & {instruction for instruction, _ in after}


@pytest.mark.parametrize("name", sorted(set(CONFIGS) & set(TARGETS)))
def test_a_target_installs_its_own_extra_with_pinned_versions(name: str) -> None:
    installs = [run for run in stage(name).values("RUN") if "pip install" in run]
    extra = CONTROL_PLANE.get(name, "worker,events,outside")
    [install] = installs
    assert install.endswith(f'pip install -c constraints.txt -e ".[{extra}]"')


@pytest.mark.parametrize("name", WITH_VLLM)
def test_vllm_is_installed_as_make_installs_it(name: str) -> None:
    [install] = [run for run in stage(name).values("RUN") if "pip install" in run]
    for_devices, _, for_cpus = install.partition(" else ")
    assert '-c constraints-vllm.txt -e ".[worker,events,outside,vllm]"' in for_cpus
    [unused] = re.findall(r"^VLLM_UNUSED := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"pip uninstall --yes {unused};" in for_cpus, "in the same layer"
    assert stage(name).values("ARG") == ["VLLM_BUILD=cpu"]
    assert f'"vllm>={MINOR},<0.' in for_devices


@pytest.mark.parametrize("name", WITH_VLLM)
def test_a_worker_with_vllm_starts_with_it_and_writes_where_it_can(name: str) -> None:
    variables = dict(
        each.split("=", 1) for line in stage(name).values("ENV") for each in line.split()
    )
    config = load_config(
        CONFIGS[TARGETS[name]],
        environ={key: value for key, value in variables.items() if key.startswith("KVMESH_")},
    )
    if TARGETS[name] not in VLLM_ALONE:
        assert config.engine.kind == "vllm"
        assert config.engine.block_size == BLOCK_SIZE
    assert variables["VLLM_CACHE_ROOT"] == variables["VLLM_CONFIG_ROOT"] == "/tmp/vllm"
    assert any("libnuma1" in run for run in stage(name).values("RUN"))


@pytest.mark.parametrize("name", TARGETS)
def test_a_password_of_an_index_does_not_stay_in_the_image(name: str) -> None:
    """Arguments and variables of a build are in the image's history; mounted secrets are not."""
    kept = [*stage(name).values("ARG"), *stage(name).values("ENV")]
    assert not [text for text in kept if "INDEX" in text]
    [install] = [run for run in stage(name).values("RUN") if "pip install" in run]
    assert install.startswith("--mount=type=secret,id=pip.conf ")
    assert "PIP_CONFIG_FILE=/run/secrets/pip.conf pip install" in install


def test_compose_hands_the_same_secret_to_every_build() -> None:
    text = yaml.safe_load(COMPOSE_FILE.read_text())
    assert set(text["secrets"]) == {"pip.conf"}
    for service in kvmesh_services().values():
        assert service["build"]["secrets"] == ["pip.conf"]
        assert not [name for name in service["build"]["args"] if "INDEX" in name]
        assert "secrets" not in service  # a running container has none


@pytest.mark.parametrize("name", TARGETS)
def test_code_comes_after_the_dependencies(name: str) -> None:
    lines = stage(name).lines
    [install] = [i for i, (kind, run) in enumerate(lines) if kind == "RUN" and "pip install" in run]
    assert install < lines.index(("COPY", "libs libs"))


@pytest.mark.parametrize("name", TARGETS)
def test_ports_of_the_stack_are_exposed(name: str) -> None:
    exposed = set(" ".join(stage(name).values("EXPOSE")).split())
    for service in kvmesh_services().values():
        if service["build"]["target"] == name:
            used = {
                value
                for variable, value in environment_of(service).items()
                if variable.endswith(("__PORT", "__DATA_PORT"))
            }
            assert used == exposed


def test_the_build_context_holds_what_is_copied_and_exists() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied: set[str] = set()
    for each in dockerfile_stages().values():
        for value in each.values("COPY"):
            if not value.startswith("--from="):
                copied |= set(value.split()[:-1])
    copied -= {name for name in copied if name.startswith("services/")} - {"services"}
    assert "*" in rules
    assert copied | {"services"} == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("name", TARGETS)
def test_no_service_has_a_compiler(name: str) -> None:
    assert not [run for run in stage(name).values("RUN") if "g++" in run]


@pytest.mark.parametrize("name", WORKERS)
def test_workers_have_the_libraries_of_every_cpu(name: str) -> None:
    assert "python scripts/build_native.py --levels all" in stage("native").values("RUN")
    copied = {value for value in stage(name).values("COPY") if value.startswith("--from=native ")}
    folders = [f"libs/kvmesh/{library.folder}" for library in LIBRARIES]
    assert copied == {f"--from=native /app/{folder}/*.so {folder}/" for folder in folders}


@pytest.mark.parametrize("name", WORKERS)
def test_kernels_are_compiled_where_a_container_can_write(name: str) -> None:
    [folder] = [text for text in stage(name).values("ENV") if text.startswith("TRITON_CACHE_DIR=")]
    assert folder.split()[0] == "TRITON_CACHE_DIR=/tmp/triton"
    writable = [service["tmpfs"] for service in kvmesh_services().values() if service["read_only"]]
    assert writable
    assert all(folders == ["/tmp"] for folders in writable)
