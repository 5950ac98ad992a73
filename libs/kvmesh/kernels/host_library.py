"""Loads the kernels of the CPU engine, which `make setup` or a wheel builds.

The library has a C ABI, so it does not depend on torch's, and shares torch's OpenMP threads because
torch is loaded first. Tests: tests/unit/kernels/test_host.py.
"""

from __future__ import annotations

import functools

import torch

from kvmesh.core.native_libraries import HOST, Loaded, NativeError, load_library
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)


@functools.cache
def load_host_library() -> Loaded | None:
    """Returns the library; None if it cannot be loaded, with one warning."""
    assert torch.get_num_threads() > 0, "torch's OpenMP is the one to share"
    try:
        return load_library(HOST)
    except NativeError as error:
        log.warning("host_kernels_missing", error=str(error), instead="torch alone, slower")
        return None
