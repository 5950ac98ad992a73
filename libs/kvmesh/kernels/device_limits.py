"""Shared memory limits of CUDA devices, for kernels whose tile sizes depend on them.

Tests: tests/unit/kernels/test_triton_kernels.py, tests/unit/engine/test_device_check.py.
"""

from __future__ import annotations

from functools import cache

import torch

# KiB by capability, or by the major number if all of it agree. All others, such as 8.6, 8.9 and
# 12.0, have the minimum. CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability".
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, 9: 227, 10: 227, 11: 227}
_LEAST_SHARED_KIB = 99
MOST_SHARED_BYTES = 227 << 10
"""Largest shared memory of a program on any device, in bytes."""


@cache
def shared_memory_bytes(device: torch.device | str) -> int:
    """Returns the maximum bytes of shared memory of one program on a CUDA device."""
    capability = torch.cuda.get_device_capability(device)
    kib = _SHARED_KIB.get(capability) or _SHARED_KIB.get(capability[0], _LEAST_SHARED_KIB)
    return kib << 10
