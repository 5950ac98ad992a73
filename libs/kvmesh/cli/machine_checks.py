"""Checks of this machine: Python, packages, cores, memory, kernel settings, model folder.

Facts that a test cannot arrange are passed as arguments.
Tests: tests/unit/cli/test_machine_checks.py.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvmesh.cli.findings import Finding
from kvmesh.cli.model_folder import read_model_folder
from kvmesh.core.errors import CheckpointError
from kvmesh.core.native_libraries import (
    LIBRARIES,
    TRANSFER,
    NativeError,
    NativeLibrary,
    cpu_flags,
    find_library,
    usable_levels,
)
from kvmesh.engine import vllm_check

_GIB = 1024**3
_NEEDED_PYTHON = (3, 11)
_TCP_SETTINGS = Path("/proc/sys/net/ipv4")

# Packages of each extra; a finding about a missing one names its extra.
EXTRAS: dict[str, tuple[str, ...]] = {
    "client": ("grpcio", "protobuf"),
    "service": ("grpcio-health-checking", "uvloop", "prometheus-client", "opentelemetry-sdk"),
    "gateway": ("aiohttp", "pydantic", "tokenizers", "fastokens", "jinja2"),
    "control plane": ("redis", "hiredis"),
    "worker": ("torch", "numpy", "safetensors"),
}
_EXTRA_NAMES = {"client": "", "control plane": "[scheduler,kvmanager]"}

Version = Callable[[str], str]
Requires = Callable[[str], list[str] | None]

_AT_LEAST = re.compile(r"([\w.-]+)[^;]*?>=\s*([0-9][0-9.]*)")


def check_python(version: tuple[int, ...]) -> Finding:
    """Checks the interpreter's version."""
    shown = ".".join(map(str, version[:3]))
    if version[:2] < _NEEDED_PYTHON:
        return Finding.fail("python", shown, "use Python 3.11 or newer")
    return Finding.ok("python", f"{shown} at {sys.executable}")


def check_packages(
    version: Version = importlib.metadata.version, oldest: Mapping[str, str] | None = None
) -> list[Finding]:
    """Checks the installed packages of each extra.

    Args:
        version: returns the version of an installed package.
        oldest: minimum versions; None: those of this distribution's requirements.
    """
    needed = oldest_versions() if oldest is None else oldest
    return [_check_extra(extra, packages, version, needed) for extra, packages in EXTRAS.items()]


def _check_extra(
    extra: str, packages: Sequence[str], version: Version, needed: Mapping[str, str]
) -> Finding:
    present, missing, old = [], [], []
    for package in packages:
        try:
            found = version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            continue
        present.append(f"{package} {found}")
        if version_numbers(found) < version_numbers(needed.get(package, "0")):
            old.append(f"{package} {found} is older than {needed[package]}")
    name = _EXTRA_NAMES.get(extra, f"[{extra}]")
    remedy = f"`make setup` in a checkout, else pip install 'kvmesh{name}'"
    if old:
        return Finding.fail(extra, ", ".join(old), remedy)
    if missing:
        text = f"{remedy} (needed by what runs the {extra})"
        return Finding.warn(extra, f"lacks {', '.join(missing)}", text)
    return Finding.ok(extra, ", ".join(present))


def oldest_versions(requires: Requires = importlib.metadata.requires) -> dict[str, str]:
    """Returns the minimum version of each required package; empty if kvmesh is not installed."""
    try:
        lines = requires("kvmesh") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (_AT_LEAST.match(line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version without zeros at the end: 2.13.0+cpu is 2, 13."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(each) for each in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def check_native(find: Callable[[NativeLibrary], tuple[Path, str]] = find_library) -> Finding:
    """Checks the C++ libraries that speed up CPU engines and data channels.

    Args:
        find: returns the path and the level of a library; raises `NativeError` without one.
    """
    try:
        levels = [f"{library.folder} {find(library)[1]}" for library in LIBRARIES]
    except NativeError as error:
        remedy = "workers compute with torch and are slower; run `make setup` in a checkout"
        return Finding.warn("native code", str(error), remedy)
    best = usable_levels()[0].name
    return Finding.ok("native code", f"{', '.join(levels)}; the best of this CPU is {best}")


def check_products(flags: frozenset[str] | None = None) -> Finding:
    """Reports the arithmetic in which an engine on this CPU multiplies weights, by dtype.

    Args:
        flags: CPU flags; None: those of this CPU.
    """
    had = cpu_flags() if flags is None else flags
    if not usable_levels(had):
        return Finding.ok("products", "by torch, in the dtype of the weights")
    if "amx_bf16" in had:
        return Finding.ok("products", "bf16 weights in tiles of bf16 (AMX); fp32 weights in fp32")
    if "avx512_bf16" in had:
        return Finding.ok("products", "bf16 weights in bf16 (AVX-512); fp32 weights in fp32")
    lacks = "this CPU lacks avx512_bf16" if "avx2" in had else "no bf16 products here"
    text = f"bf16 and fp32 weights in fp32: {lacks}; bf16 weights and KV stay bf16 in memory"
    return Finding.ok("products", text)


def native_notes(
    engine: str, device: str, find: Callable[[NativeLibrary], tuple[Path, str]] = find_library
) -> list[str]:
    """Returns notes for workers that start without native code; empty if they have it.

    Args:
        engine: `kvmesh`, `vllm` or `fake`.
        device: device of the engine; native kernels are for CPUs.
        find: as in `check_native`.
    """
    needed = LIBRARIES if (engine, device) == ("kvmesh", "cpu") else (TRANSFER,)
    for library in needed:
        try:
            find(library)
        except NativeError as error:
            return [f"workers run slower, without native code: {error}"]
    return []


def check_cores(cores: int, omp_num_threads: str) -> Finding:
    """Checks the number of cores, and the threads that each engine would start."""
    detail = f"{cores} usable, OMP_NUM_THREADS={omp_num_threads or 'unset'}"
    if cores < 2:
        return Finding.warn("cores", detail, "two or more keep engine and control plane apart")
    if omp_num_threads.isdecimal() and int(omp_num_threads) >= cores:
        remedy = "engines would compete for cores; unset it, and `up` divides the cores"
        return Finding.warn("cores", detail, remedy)
    return Finding.ok("cores", detail)


def check_memory(available_bytes: int) -> Finding:
    """Checks the memory for a small stack."""
    detail = f"{available_bytes / _GIB:.1f} GiB available"
    if available_bytes < 2 * _GIB:
        remedy = "a stack with two engines of the embedded model takes about 2 GiB; free some"
        return Finding.warn("memory", detail, remedy)
    return Finding.ok("memory", detail)


def check_congestion_control(settings: Path = _TCP_SETTINGS) -> Finding:
    """Checks the TCP congestion control of the KV data channels."""
    try:
        name = (settings / "tcp_congestion_control").read_text().strip()
        allowed = (settings / "tcp_allowed_congestion_control").read_text().split()
    except OSError:
        return Finding.ok("congestion", "not known on this system")
    if not re.fullmatch(r"bbr\d*", name):
        return Finding.ok("congestion", name)
    if "cubic" in allowed:
        return Finding.ok("congestion", f"{name}, data channels choose cubic themselves")
    remedy = (
        "bbr paces connections on loopback and in a rack below their speed; let data channels "
        "choose cubic: sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
    )
    return Finding.warn("congestion", f"{name}, cubic is not allowed", remedy)


def check_vllm(
    model: Path | None,
    version: Version = importlib.metadata.version,
    load: Callable[[str], object] = ctypes.CDLL,
) -> Finding:
    """Checks the optional engine `vllm`, and whether it can serve the model.

    Args:
        version: returns the version of an installed package.
        load: see `vllm_check.installation_problems`.
    """
    found = vllm_check.installed_version(version)
    if not found:
        return Finding.ok("vllm", "not installed; only `--engine vllm` needs it")
    problems = vllm_check.installation_problems(version, load=load)
    if problems:
        return Finding.fail("vllm", f"vLLM {found} cannot be loaded", "; ".join(problems))
    detail = f"{found}, for `--engine vllm`"
    try:
        read = None if model is None else vllm_check.read_vllm_model(model)
    except CheckpointError:
        read = None  # `check_model` reports it
    if read is None:
        return Finding.ok("vllm", detail)
    device, block_size = vllm_check.build_device(version), vllm_check.BLOCK_SIZE
    problems = vllm_check.model_problems(read, device=device, block_size=block_size)
    if problems:
        return Finding.warn("vllm", f"{found}, not for this model", "; ".join(problems))
    if not_run := vllm_check.not_run(read):
        return Finding.warn("vllm", detail, f"{not_run}: compare some answers with `vllm serve`")
    return Finding.ok("vllm", detail)


def check_model(path: Path | None) -> Finding:
    """Checks the model folder; None: there is no model."""
    if path is None:
        return Finding.fail("model", "none found", "name a model folder with --model")
    try:
        folder = read_model_folder(path)
    except CheckpointError as error:
        return Finding.fail("model", str(error), "copy the whole folder, or name another")
    size = folder.weight_bytes / 1024**2
    return Finding.ok("model", f"{path.name}: {folder.config.dtype}, {size:.0f} MiB of weights")
