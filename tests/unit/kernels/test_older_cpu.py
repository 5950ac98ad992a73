"""The host's kernels as on older CPUs than this one."""

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

OLDER = {
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""For torch and its products, by level."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", OLDER)
def test_kernels_give_the_same_on_an_older_cpu(level: str) -> None:
    try:
        load_library(HOST, level=level)
    except NativeError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "tests.unit.kernels.older_cpu", *(str(HERE / name) for name in TESTED)],
        cwd=ROOT,
        env={**os.environ, **OLDER[level], "OMP_NUM_THREADS": "1", "TESTED_LEVEL": level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
