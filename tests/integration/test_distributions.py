"""Wheel and sdist: what is in them, and that the wheel works where nothing else is installed."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvmesh.core.config import child_environment
from kvmesh.core.native_libraries import LIBRARIES, machine_levels

# Units of the C++ libraries that this CPU does not use may have to be compiled.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_paths()["purelib"])
BASE_PACKAGES = ("grpc", "google", "typing_extensions.py")
"""What grpcio and protobuf install."""

ALL_PACKAGES = {"PYTHONPATH": str(SITE)}
"""Everything that is installed here, but not this checkout's `kvmesh`."""


@dataclass(frozen=True)
class Built:
    """Files that `make dist` makes."""

    wheel: Path
    sdist: Path


def _ended(
    *command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that finds no `kvmesh` but the installed one, and has ended."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=child_environment({"PYTHONPATH": ""} | (env or {})),
        capture_output=True,
        text=True,
        check=False,
    )


def _run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = _ended(*command, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _tracked() -> list[str]:
    """Files that git knows of, but for those that were removed and not committed yet."""
    names = _run("git", "ls-files").splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def _build(source: Path, out: Path, *kinds: str, env: dict[str, str] | None = None) -> None:
    _run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source, env=env)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both, from a copy of what git tracks, with what the compiler has made for this tree."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    for name in _tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    native = ROOT / "build" / "native"
    native.mkdir(parents=True, exist_ok=True)
    (source / "build").mkdir(exist_ok=True)
    (source / "build" / "native").symlink_to(native)
    _build(source, folder / "out", "--sdist", "--wheel")
    (wheel,), (sdist,) = (folder / "out").glob("*.whl"), (folder / "out").glob("*.tar.gz")
    return Built(wheel, sdist)


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    sources = {
        name.removeprefix("libs/")
        for name in _tracked()
        if name.startswith("libs/kvmesh/") and not name.endswith((".cpp", ".h"))
    }
    compiled = {
        f"kvmesh/{library.folder}/{library.file_name(level)}"
        for library in LIBRARIES
        for level in machine_levels()
    }
    if shutil.which("c++") is None and shutil.which("g++") is None:
        compiled = set()
    names = {name for name in _names(built.wheel) if ".dist-info/" not in name}
    assert names == sources | compiled
    kinds = ("py.typed", "v1/scheduler_service_pb2.pyi", "console/static/index.html")
    assert {f"kvmesh/{kind}" for kind in kinds} <= names


def test_the_wheel_says_what_it_is(built: Built) -> None:
    said = _metadata(built.wheel)
    assert said["License-Expression"] == "Apache-2.0"
    assert set(said.get_all("License-File", [])) == {"LICENSE", "NOTICE"}
    assert "Typing :: Typed" in said.get_all("Classifier", [])
    needed = [each for each in said.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert {Requirement(each).name for each in needed} == {"grpcio", "protobuf"}
    licences = {name.split("/")[-1] for name in _names(built.wheel) if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


def test_the_sdist_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    # By tar: Python 3.11.2 and 3.11.4 extract by other arguments.
    subprocess.run(["tar", "-xzf", built.sdist, "-C", tmp_path], check=True)
    (source,) = [each for each in tmp_path.iterdir() if each.is_dir()]
    assert (source / "protos/kvmesh/v1/inference_service.proto").is_file()
    for left_out in ("tests", "services", "models", "bench"):
        assert not (source / left_out).exists()
    # Without a compiler: that the C++ sources are there is seen here, and that they compile above.
    sources = {path.relative_to(ROOT) for path in ROOT.glob("libs/kvmesh/**/*.[ch]*")}
    cpp = {path for path in sources if path.suffix in {".cpp", ".h"}}
    assert cpp
    assert all((source / path).is_file() for path in cpp)
    _build(source, tmp_path / "out", "--wheel", env={"PATH": "/nonexistent"})
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert _names(wheel) == {name for name in _names(built.wheel) if not name.endswith(".so")}


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, grpcio and protobuf."""
    folder = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    _run(*pip, "install", "--no-index", "--no-deps", built.wheel)
    site = next(folder.glob("lib/python3*/site-packages"))
    for name in BASE_PACKAGES:
        (site / name).symlink_to(SITE / name)
    return folder / "bin"


def test_the_client_and_the_command_work_by_themselves(installed: Path, tmp_path: Path) -> None:
    program = "import kvmesh.client; print(kvmesh.client.__file__)"
    assert "/venv" in _run(installed / "python", "-c", program, cwd=tmp_path)
    assert _run(installed / "kvmesh", "--version", cwd=tmp_path).startswith("kvmesh 0.")


@pytest.mark.parametrize("command", ["up", "chat", "plan"])
def test_a_command_says_in_a_line_which_extra_it_needs(
    command: str, installed: Path, tmp_path: Path
) -> None:
    done = _ended(installed / "kvmesh", command, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install 'kvmesh[" in line


def test_up_says_in_a_line_that_it_needs_a_checkout(installed: Path, tmp_path: Path) -> None:
    done = _ended(installed / "kvmesh", "up", cwd=tmp_path, env=ALL_PACKAGES)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path} is not a checkout" in line


def test_what_the_planner_reads_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    shown = _run(installed / "kvmesh", "plan", cwd=tmp_path, env=ALL_PACKAGES)
    assert shown.startswith("profile prfaas")
