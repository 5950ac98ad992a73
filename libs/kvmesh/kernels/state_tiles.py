"""How the kernels of linear states cut a state, the same for all of them.

Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

_MOST_COLUMNS = 32
# Capabilities, by their first number, whose tensor cores read an operand from shared memory.
_WIDE = (9, 10)


def state_tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    """Constants of a launch; a program has all rows of a state and VALUE_TILE of its columns."""
    return {
        "KEY_DIM": key_dim,
        "KEY_TILE": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_DIM": value_dim,
        "VALUE_TILE": max(16, min(_MOST_COLUMNS, triton.next_power_of_2(value_dim))),
    }


def scan_launch(x: Tensor, value_dim: int) -> dict[str, int]:
    """Columns of a state per program and its warps, where states go from chunk to chunk.

    Elsewhere than on `_WIDE` both operands of a product are held in registers: of a state of 128
    rows more than 16 columns would spill (tests/unit/kernels/register_table.py).
    """
    # Only the interpreter runs on host tensors.
    is_wide = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] in _WIDE
    columns = _MOST_COLUMNS if is_wide else 16
    return {
        "VALUE_TILE": max(16, min(columns, triton.next_power_of_2(value_dim))),
        "num_warps": 4 if is_wide else 8,
    }
