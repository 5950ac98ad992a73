"""Builds and loads `host.cpp`, once per machine and version; without a compiler there is none.

The library is kept in the user's cache under a name that follows from the source, the compiler
and the CPU. It has a C ABI, so it does not depend on torch's, and shares torch's OpenMP threads
because torch is loaded first. Tests: tests/unit/kernels/test_host.py.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from kvmesh.core.compiled import CompileError, load_compiled
from kvmesh.telemetry.logs import event_logger

_SOURCE = Path(__file__).with_name("host.cpp")
_FLAGS: tuple[str, ...] = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17", "-fno-math-errno"),
)

log = event_logger(__name__)


@functools.cache
def load_host_library() -> ctypes.CDLL | None:
    """The compiled library, or None when it cannot be had; says so once, as a warning."""
    assert torch.get_num_threads() > 0, "torch's OpenMP is the one to share"
    try:
        return load_compiled(_SOURCE, _FLAGS)
    except CompileError as error:
        log.warning("host_kernels_not_built", error=str(error), instead="torch alone, slower")
        return None
