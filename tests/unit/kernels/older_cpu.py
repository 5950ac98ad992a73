"""A pytest plugin: the host's kernels as on a CPU whose best level is TESTED_LEVEL."""

from __future__ import annotations

import os

from kvmesh.core import native_libraries
from kvmesh.core.native_libraries import usable_levels

_LEVELS = tuple(level for level in usable_levels() if level.name == os.environ["TESTED_LEVEL"])
native_libraries.usable_levels = lambda flags=None: _LEVELS
