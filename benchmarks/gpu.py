"""`make bench-gpu`: what a CUDA device is wanted for, the most telling first.

    python -m benchmarks.gpu [--minutes 30] [--steps kernels decode tests device vllm] [--out DIR]

Kernels against twins and rivals, decode with CUDA graphs and without, the tests of tests/gpu
that need little more than torch, blocks out of and into pools, vLLM over a pool on the device
(where vLLM is not installed its checks say "not run"). Each step is a process with a time
limit of its own; one that fails or is late stops no other, and each writes its tables and its log
as it goes, to build/bench-gpu unless told otherwise. Installs nothing: what a step lacks (the
tests: pytest) is missing in that step alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernels import DEVICE_LOST
from benchmarks.result import ROOT

OUT = ROOT / "build" / "bench-gpu"
"""Out of git's sight: logs, and tables of a run that was cut short, are no results."""
_RESTARTS = 5
# A machine made for something else has pytest, but not the plugins that pyproject.toml configures.
_BARE_PYTEST = [
    *("-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib"),
    *("--noconftest", "--continue-on-collection-errors", "-p", "no:cacheprovider"),
]
_ENGINE_TESTS = ("test_graphs.py", "test_runner.py", "test_hybrids.py", "test_device_pool.py")
_KERNEL_TESTS = ("test_attention.py", "test_fused.py", "test_draw.py", "test_block_copy.py")


@dataclass(frozen=True, slots=True)
class GpuStep:
    """One process.

    Attributes:
        arguments: of Python.
        limit_s: it is ended after.
        again: arguments added when it asks for a new process.
        python: the interpreter.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float
    again: Sequence[str] = ()
    python: str = sys.executable


def steps(out: Path) -> list[GpuStep]:
    """All steps, in their order; files go to a folder."""
    tests = [f"tests/gpu/{name}" for name in (*_KERNEL_TESTS, *_ENGINE_TESTS)]

    def bench(module: str, name: str) -> list[str]:
        return ["-m", f"benchmarks.{module}", "--save", str(out / f"{name}.json")]

    return [
        GpuStep("kernels", bench("kernels", "kernels"), 540.0, ("--resume",)),
        GpuStep("decode", bench("gpu_decode", "gpu_decode"), 240.0),
        GpuStep("tests", ["-m", "pytest", *_BARE_PYTEST, "-q", "-rfE", *tests], 420.0),
        GpuStep("device", bench("device", "device"), 240.0),
        GpuStep("vllm", bench("gpu_vllm", "gpu_vllm"), 240.0, python=_vllm_python()),
    ]


def _vllm_python() -> str:
    """Of vLLM's own environment where `make up-vllm` made it."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def main() -> None:
    """Runs the steps; fails when one did."""
    options = _parse()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    results = {
        step.name: _run(step, end, options.out)
        for step in steps(options.out)
        if step.name in options.steps
    }
    for name, said in results.items():
        sys.stdout.write(f"{name}: {said}\n")
    sys.exit(any(said != "done" for said in results.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [step.name for step in steps(Path())]
    parser.add_argument("--minutes", type=float, default=30.0, help="for all steps together")
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=OUT, help="where results and logs go")
    return parser.parse_args()


def _run(step: GpuStep, end: float, out: Path) -> str:
    """Runs one step, anew when its process can launch nothing more; what became of it."""
    arguments, deadline = list(step.arguments), min(end, time.monotonic() + step.limit_s)
    for _ in range(_RESTARTS):
        command = [step.python, *arguments]
        code = _call(command, deadline - time.monotonic(), out / f"{step.name}.log")
        if code != DEVICE_LOST or not step.again:
            break
        arguments = [*step.arguments, *step.again]
    if code is None:
        return "out of time"
    return "done" if code == 0 else f"ended with {code}"


def _call(command: Sequence[str], timeout_s: float, log: Path) -> int | None:
    """Runs Python with what it says going to a log; its exit code, None when it was too late."""
    if timeout_s <= 0:
        return None
    sys.stdout.write(f"{' '.join(command)}\n")
    sys.stdout.flush()
    path = os.pathsep.join([str(ROOT), str(ROOT / "libs")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        try:
            return subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


if __name__ == "__main__":
    main()
