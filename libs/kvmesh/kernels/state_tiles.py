"""How the kernels of linear states cut a state, the same for all of them.

Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import triton

_MOST_COLUMNS = 32


def state_tiles(key_dim: int, value_dim: int) -> dict[str, int]:
    """Constants of a launch; a program has all rows of a state and VALUE_TILE of its columns."""
    return {
        "KEY_DIM": key_dim,
        "KEY_TILE": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_DIM": value_dim,
        "VALUE_TILE": max(16, min(_MOST_COLUMNS, triton.next_power_of_2(value_dim))),
    }
