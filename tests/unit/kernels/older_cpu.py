"""A pytest plugin: the host's kernels compiled as for a CPU with vectors of 256 bits."""

from __future__ import annotations

from kvmesh.kernels import host_library

host_library._FLAGS = tuple(
    "-march=x86-64-v3" if flag.startswith("-march=") else flag for flag in host_library._FLAGS
)
