"""A first start in a fresh clone, in short: `make bench-first-start` does all of it.

What is installed is that of this interpreter. The clone is built and started in it.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.start_sandbox import Leftovers, Sandbox, busy_loops, free_port
from kvmesh.core.native_libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, "scripts/build_native.py"]
SEED = 17
NUM_INTERRUPTS = 3
BUILD_S = 6.0
"""Less than a build takes: it is still under way at every moment of an interrupt."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox.clone(ROOT, tmp_path)
    yield made
    assert str(made.leftovers()) == "nothing"


def copy_libraries(clone: Path) -> None:
    """Takes over what was built here, if anything was."""
    for library in LIBRARIES:
        folder = Path("libs") / "kvmesh" / library.folder
        for file in (ROOT / folder).glob("*.so"):
            shutil.copy2(file, clone / folder)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler to interrupt")
def test_an_interrupted_build_leaves_no_compiler_and_no_file(sandbox: Sandbox) -> None:
    draw = random.Random(SEED)
    for after_s in sorted(draw.uniform(0.0, BUILD_S) for _ in range(NUM_INTERRUPTS)):
        with sandbox.running(BUILD) as build:
            build.wait(after_s)
            build.interrupt(20.0)
            assert sandbox.leftovers() == Leftovers(), f"interrupted after {after_s:.2f} s"


@pytest.mark.long
def test_a_start_on_one_crowded_core_serves_and_leaves_nothing(sandbox: Sandbox) -> None:
    copy_libraries(sandbox.clone_folder)
    paths = f"PYTHONPATH={sandbox.clone_folder}/libs:{sandbox.clone_folder}"
    up = ["env", paths, sys.executable, "-m", "kvmesh.cli", "up", "--port", str(free_port())]
    with (
        busy_loops(3, {0}),
        sandbox.running([*up, "--prefill", "1", "--decode", "1"], {0}) as start,
    ):
        served = start.wait_until_served(200.0)
        assert served.ready_s <= served.first_token_s
        start.interrupt(30.0)
        assert sandbox.leftovers() == Leftovers()
