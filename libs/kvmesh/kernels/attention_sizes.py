"""How large the tiles of attention kernels are, and into how many parts they cut contexts.

Pure. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DECODE_TILE = 64
NO_WINDOW = 1 << 30
"""Longer than any context."""
# Of a padded head: with more, tiles of so many positions pass the least shared memory that a
# program may have, the 99 KiB of sm_86, sm_89 and sm_120.
_TILE_ROW_BYTES = 512
# The least that matrix units take.
_LEAST_TILE = 16
# What the larger tiles of a prompt take, with loads running ahead.
_LARGE_TILES_BYTES = 161 << 10
# Of sm_90 and sm_100.
_HOPPER_BYTES = 227 << 10
# Of one program: with fewer, the second level of the cache is read faster than it gives.
_MANY_QUERIES = 128
# Programs that fill a large device twice over; contexts are split until there are as many.
_TARGET_PROGRAMS = 264


def tile_of(head_dim: int, element_size: int) -> int:
    """Positions that a program takes at once: fewer where heads are long, to fit shared memory."""
    padded = (1 << (head_dim - 1).bit_length()) * element_size
    # fp32 lies there twice: operands, and what three tf32 products take of them.
    needed = 2 * padded if element_size == torch.float32.itemsize else padded
    return max(_LEAST_TILE, min(DECODE_TILE, DECODE_TILE * _TILE_ROW_BYTES // needed))


# Loops whose loads need a block table first: with three stages one tile is on its way while
# another is computed, with five two are. Read off what the compiler makes of them.
_STAGES, _MORE_STAGES = 3, 5


def stages_of(head_dim: int, element_size: int, shared_bytes: int) -> int:
    """Stages of a loop over tiles of positions: more where another tile fits beside.

    Args:
        shared_bytes: that a program may have.
    """
    is_short = head_dim <= 128 and element_size < torch.float32.itemsize
    return _MORE_STAGES if is_short and shared_bytes >= _LARGE_TILES_BYTES else _STAGES


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """What one program of a prompt's attention takes at once."""

    queries: int
    positions: int
    warps: int


def prompt_tiles_of(
    head_dim: int, element_size: int, shared_bytes: int, max_query_len: int
) -> PromptTiles:
    """As `tile_of`, for prompts.

    Args:
        shared_bytes: that a program may have.
        max_query_len: of the longest chunk.

    Source: tiles of heads up to 128 are those that PyTorch 2.13's FlexAttention takes on A100, H100
        and B200 before it tunes (`_inductor/template_heuristics/triton.py`).
    """
    tile = tile_of(head_dim, element_size)
    if element_size == torch.float32.itemsize:
        return PromptTiles(tile, tile, 4)
    if shared_bytes < _LARGE_TILES_BYTES:
        # In the registers of four warps there is no room for a whole tile of long heads.
        small = tile if head_dim <= 128 else tile // 2
        return PromptTiles(small, small, 4)
    if head_dim > 128:
        return PromptTiles(tile, tile, 8)
    if max_query_len <= tile:
        return PromptTiles(tile, tile, 4)
    # Four warps hold a tile of short heads where matrix units read operands from shared memory.
    few_warps = head_dim <= 64 and shared_bytes >= _HOPPER_BYTES
    return PromptTiles(_MANY_QUERIES, tile, 4 if few_warps else 8)


def num_decode_splits(num_programs: int, longest: int, tile: int = DECODE_TILE) -> int:
    """Into how many parts contexts are cut so that the device is filled.

    Args:
        num_programs: where no context is cut.
        longest: positions of the longest context.
        tile: positions that a program takes at once.
    """
    # The nearest: with twice as many as run at once, the last ones have the device to themselves.
    wanted = (2 * _TARGET_PROGRAMS + num_programs) // (2 * num_programs)
    # Parts under four tiles cost more in the merge than they win.
    return max(1, min(wanted, longest // (4 * tile)))
