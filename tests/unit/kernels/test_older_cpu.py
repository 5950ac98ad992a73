"""The host's kernels without vectors of 512 bits, whatever this CPU has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvmesh.core.native_libraries import HOST, NativeError, load_library
from tests.unit.kernels.apart import HERE, ROOT

TESTED = (
    *("test_host.py", "test_host_layer.py", "test_linear.py"),
    *("test_latent.py", "test_partial.py"),
)

OLDER = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""For torch and its products."""


def _has_it() -> bool:
    try:
        return bool(load_library(HOST, level="avx2"))
    except NativeError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not _has_it(), reason="no library for AVX2: install g++, then `make setup`")
def test_kernels_give_the_same_on_a_cpu_with_vectors_of_256_bits() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "tests.unit.kernels.older_cpu", *(str(HERE / name) for name in TESTED)],
        cwd=ROOT,
        env={**os.environ, **OLDER},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
