"""Runs a test module in a process of its own: TRITON_INTERPRET is read when a kernel is defined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run_apart(modules: Iterable[str], cache: Path, interpret: bool) -> int:
    """Runs test modules of this folder; the number of tests that passed, which it also writes."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    # Triton 3.9 warns where it is not said.
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    # The time of all of them is limited where they are started from.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=0"]
    # Triton 3.9 makes syntax trees in a way that Python 3.14 warns of.
    command += ["-W", "ignore:AnnAssign.__init__ missing 1 required:DeprecationWarning"]
    done = subprocess.run(
        [*command, *(str(HERE / module) for module in modules)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    kind = "interpreted" if interpret else "compiled"
    sys.stdout.write(f"{passed[1]} tests {kind}\n")
    return int(passed[1])
