"""The host's kernels without vectors of 512 bits, whatever this CPU has."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from kvmesh.core.compiled import find_compiler
from tests.unit.kernels.apart import HERE, ROOT

TESTED = ("test_host.py", "test_host_layer.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    platform.machine() != "x86_64" or find_compiler() is None,
    reason="needs a C++ compiler for x86-64",
)
def test_kernels_give_the_same_on_a_cpu_with_vectors_of_256_bits() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "tests.unit.kernels.older_cpu", *(str(HERE / name) for name in TESTED)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
