"""The order, limits and restarts of what a device is wanted for, with processes that need none."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_vllm
from benchmarks.gpu import OUT, GpuStep, _run, steps
from benchmarks.gpu_decode import as_row
from benchmarks.kernels import DEVICE_LOST
from benchmarks.result import ROOT


def end() -> float:
    return time.monotonic() + 60


def test_steps_fit_in_half_an_hour_and_their_files_exist() -> None:
    found = steps(Path("out"))
    assert found[0].name == "kernels"
    assert sum(step.limit_s for step in found) <= 30 * 60
    named = [each for step in found for each in step.arguments if each.startswith("tests/")]
    assert named
    assert all((ROOT / each).is_file() for each in named)


def test_a_process_that_lost_the_device_is_followed_by_one_that_resumes(tmp_path: Path) -> None:
    lost = f"import sys; sys.exit(0 if '--resume' in sys.argv else {DEVICE_LOST})"
    step = GpuStep("kernels", ["-c", lost], 30.0, ("--resume",))
    assert _run(step, end(), tmp_path) == "done"


def test_what_fails_or_is_late_says_so(tmp_path: Path) -> None:
    failing = GpuStep("tests", ["-c", "print('why'); raise SystemExit(2)"], 30.0)
    assert _run(failing, end(), tmp_path) == "ended with 2"
    assert (tmp_path / "tests.log").read_text() == "why\n"
    late = GpuStep("late", ["-c", "input()"], 0.0)
    assert _run(late, end(), tmp_path) == "out of time"


def test_kernels_and_decode_need_little_more_than_torch() -> None:
    missing = (
        "rich",
        "grpc",
        "google",
        "redis",
        "uvloop",
        "crc32c",
        "aiohttp",
        "prometheus_client",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r}));"
    code += "import benchmarks.gpu, benchmarks.gpu_decode"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not gpu_vllm._missing(), reason="this machine can run them")
def test_checks_of_vllm_say_why_they_were_not_run(tmp_path: Path) -> None:
    (step,) = (each for each in steps(tmp_path) if each.name == "vllm")
    assert _run(replace(step, python=sys.executable), end(), tmp_path) == "done"
    rows = json.loads((tmp_path / "gpu_vllm.json").read_text())["rows"]
    assert [row["check"] for row in rows] == list(gpu_vllm.CHECKS)
    assert {row["result"] for row in rows} == {f"not run: {gpu_vllm._missing()}"}


def test_a_row_tells_the_share_of_the_floor_and_what_graphs_gain() -> None:
    cell = {"kvmesh without graphs": 50.0, "kvmesh": 100.0, "floor": 125.0}
    found = {"model": "m", "dtype": "bfloat16", "cell": "cuda decode 1", "tokens_per_s": cell}
    row = as_row(found | {"floor_by": "reading"})
    assert (row["share of floor"], row["graphs gain"]) == (0.8, 2.0)
    assert row["floor by"] == "reading"


def test_what_it_writes_is_out_of_sight_for_git() -> None:
    folder = OUT.relative_to(ROOT).parts[0]
    assert f"{folder}/" in (ROOT / ".gitignore").read_text().splitlines()
