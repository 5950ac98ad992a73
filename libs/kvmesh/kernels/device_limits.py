"""What a CUDA device grants a program, for kernels whose tiles depend on it.

Tests: tests/unit/kernels/test_triton_kernels.py, tests/unit/engine/test_device_check.py.
"""

from __future__ import annotations

from functools import cache

import torch

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": by capability, and
# by the first number of those that are alike. The rest, such as 8.6, 8.9 and 12.0, has the least.
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, 9: 227, 10: 227, 11: 227}
_LEAST_SHARED_KIB = 99
MOST_SHARED_BYTES = 227 << 10
"""Of any device."""


@cache
def shared_memory_bytes(device: torch.device | str) -> int:
    """Most shared memory that one program of a kernel may have on a CUDA device."""
    capability = torch.cuda.get_device_capability(device)
    kib = _SHARED_KIB.get(capability) or _SHARED_KIB.get(capability[0], _LEAST_SHARED_KIB)
    return kib << 10
