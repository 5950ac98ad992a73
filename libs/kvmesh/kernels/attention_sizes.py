"""How large the tiles of attention kernels are, and into how many parts they cut contexts.

Pure. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch

DECODE_TILE = 64
# Of a padded head: with more, tiles of so many positions pass the least shared memory that a
# program may have, the 99 KiB of sm_86, sm_89 and sm_120.
_TILE_ROW_BYTES = 512
# The least that matrix units take.
_LEAST_TILE = 16
# What two tiles of a prompt with heads over 128 take, with loads running ahead.
_LONG_HEADS_BYTES = 161 << 10
# Programs that fill a large device twice over; contexts are split until there are as many.
_TARGET_PROGRAMS = 264


def tile_of(head_dim: int, element_size: int) -> int:
    """Positions that a program takes at once: fewer where heads are long, to fit shared memory."""
    padded = (1 << (head_dim - 1).bit_length()) * element_size
    # fp32 lies there twice: operands, and what three tf32 products take of them.
    needed = 2 * padded if element_size == torch.float32.itemsize else padded
    return max(_LEAST_TILE, min(DECODE_TILE, DECODE_TILE * _TILE_ROW_BYTES // needed))


def prompt_tile_of(head_dim: int, element_size: int, shared_bytes: int) -> tuple[int, int]:
    """As `tile_of`, for prompts, with the number of warps.

    Args:
        shared_bytes: that a program may have.
    """
    tile = tile_of(head_dim, element_size)
    if head_dim <= 128 or element_size == torch.float32.itemsize:
        return tile, 4
    # In the registers of four warps there is no room for such a tile's result.
    return (tile, 8) if shared_bytes >= _LONG_HEADS_BYTES else (tile // 2, 4)


def num_decode_splits(num_programs: int, longest: int, tile: int = DECODE_TILE) -> int:
    """Into how many parts contexts are cut so that the device is filled.

    Args:
        num_programs: where no context is cut.
        longest: positions of the longest context.
        tile: positions that a program takes at once.
    """
    wanted = -(-_TARGET_PROGRAMS // num_programs)
    # Parts under four tiles cost more in the merge than they win.
    return max(1, min(wanted, longest // (4 * tile)))
