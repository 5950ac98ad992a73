"""Compiles policies and simulator from their typed source with mypyc: python -m
scripts.compile_simulator FOLDER.

FOLDER then holds a copy of the package with native modules; with it in PYTHONPATH a simulation
takes about half the time and decides the same. Without a C compiler it holds the plain copy.
Tests: tests/unit/packaging/test_compile_simulator.py.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmesh.core.config import child_environment
from scripts.native_constructors import base_names, with_constructors

LIBS = Path(__file__).resolve().parent.parent / "libs"

MODULES = tuple(
    f"kvmesh/{package}/{name}.py"
    for package, names in {
        "core": "busy_time pace types",
        "kv": "bit_tree block_news block_parts block_pool free_segments handoff handoff_types",
        "policy": "allocation_loop baselines batching chain composition connections crowd curves "
        "fair_share fetch_route fleet_index forwarding group_route groups holders joint late "
        "load_score "
        "mixed_step offload pdserve prefill_times prefix_source ranking reasons "
        "recent_reads role_loop role_switch routing seats step_rules token_pace view waiting",
        "sim": "control decoding events fetch fleet gaps link placing prefix_index profile "
        "requests router scenario simulation steps systems trace trace_request turns worker "
        "worker_listener",
    }.items()
    for name in names.split()
)
"""What a simulated request passes through. No interpreted class may be derived from one of
theirs, and nothing replaces a function of theirs: compiled callers would not notice."""

_STAMP = "compiled.sha256"
_SETTINGS = {"MYPYC_OPT_LEVEL": "1", "MYPYC_DEBUG_LEVEL": "0"}
"""The compiler's higher levels take several times as long."""

_EXAMPLE = (
    *("kvmesh.cli", "simulate", "--requests", "300", "--rate", "6", "--turns", "3"),
    *("--shared", "4", "--failures", "5:kill:1,20:restart:1", "--system", "kvmesh,pdserve,joint"),
)
"""What compiled and plain modules must agree on, to the last digit."""


def identity(libs: Path) -> str:
    """Changes with the sources, the compiled ones among them, and the interpreter."""
    found = hashlib.sha256(f"{sys.version} {sysconfig.get_platform()} {MODULES}".encode())
    for path in sorted(each for each in libs.rglob("*") if each.suffix in (".py", ".json")):
        found.update(str(path.relative_to(libs)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def is_ours(folder: Path) -> bool:
    """Whether a folder may be written anew: it holds nothing yet, or an earlier copy."""
    if not folder.exists():
        return True
    return folder.is_dir() and ((folder / _STAMP).is_file() or not any(folder.iterdir()))


def copy_sources(libs: Path, folder: Path) -> None:
    """Puts a plain copy of the package there, in place of an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _STAMP).write_text("plain")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(libs, folder, ignore=ignored, dirs_exist_ok=True)


def compile_modules(folder: Path) -> str:
    """Compiles the copy; returns what went wrong, or nothing."""
    sources = {path: path.read_text() for path in map(folder.joinpath, MODULES)}
    derived_from = base_names([ast.parse(source) for source in sources.values()])
    for path, source in sources.items():
        path.write_text(with_constructors(source, derived_from))
    done = _run(["mypyc", "--ignore-missing-imports", *MODULES], folder, _SETTINGS)
    return "" if done.returncode == 0 else _said(done)


def compare(libs: Path, folder: Path) -> str:
    """Runs one small simulation with both; returns what went wrong, or nothing."""
    records: list[str] = []
    for packages, name in ((libs, "plain"), (folder, "compiled")):
        record = folder / f"{name}.json"
        done = _run([*_EXAMPLE, "--json", str(record)], packages, {})
        if done.returncode:
            return _said(done)
        records.append(record.read_text())
        record.unlink()
    return "" if records[0] == records[1] else "compiled modules decide otherwise than plain ones"


def _run(
    arguments: Sequence[str], packages: Path, settings: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=packages,
        env=child_environment({**settings, "PYTHONPATH": str(packages)}),
        capture_output=True,
        text=True,
        check=False,
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip())[-2000:]


def main(argv: Sequence[str]) -> int:
    """Compiles unless the folder holds just this already."""
    parser = argparse.ArgumentParser("python -m scripts.compile_simulator")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder.resolve()
    stamp, wanted = folder / _STAMP, identity(LIBS)
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    if not is_ours(folder):
        print(f"{folder} holds something else; name another folder, or remove it", file=sys.stderr)
        return 2
    print(f"compiling {len(MODULES)} modules, which takes a minute or two", flush=True)
    copy_sources(LIBS, folder)
    wrong = compile_modules(folder) or compare(LIBS, folder)
    if wrong:
        # Half a set would be worse than none: compiled modules rely on each other.
        for library in folder.rglob("*.so"):
            library.unlink()
        print(f"{wrong}\nnot compiled; {folder} holds the plain modules", file=sys.stderr)
    else:
        stamp.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
