"""A pytest plugin: the host's kernels as on a CPU with vectors of 256 bits."""

from __future__ import annotations

from kvmesh.core import native_libraries
from kvmesh.core.native_libraries import usable_levels

_LEVELS = tuple(level for level in usable_levels() if level.name == "avx2")
native_libraries.usable_levels = lambda flags=None: _LEVELS
