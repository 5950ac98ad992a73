"""This machine as one whose CPU has vectors of 256 bits and no bf16 (AVX2), for every engine.

Torch and oneDNN are told by their environment, which they read when they are loaded; our libraries
by their levels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvmesh.core import native_libraries
from kvmesh.core.config import child_environment, environment
from kvmesh.core.native_libraries import usable_levels

_LEVEL = "avx2"
_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def use_avx2(module: str, arguments: Sequence[str]) -> None:
    """Goes on with AVX2 alone: starts the module anew where libraries were not told yet.

    Args:
        module: that is running.
        arguments: its own.
    """
    if any(environment(name) != value for name, value in _ENVIRONMENT.items()):
        command = [sys.executable, "-m", module, *arguments]
        os.execve(sys.executable, command, child_environment(_ENVIRONMENT))
    levels = tuple(level for level in usable_levels() if level.name == _LEVEL)
    native_libraries.usable_levels = lambda flags=None: levels
