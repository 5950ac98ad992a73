"""Tile sizes of the attention kernels, and the number of parts of decode contexts.

Pure. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DECODE_TILE = 64
NO_WINDOW = 1 << 30
"""Window size longer than any context."""
# Bytes of a padded head up to which a full tile of positions fits the smallest shared memory of a
# program, the 99 KiB of sm_86, sm_89 and sm_120.
_TILE_ROW_BYTES = 512
# Smallest tile of the matrix units.
_LEAST_TILE = 16
# Shared memory of the larger prompt tiles with pipelined loads.
_LARGE_TILES_BYTES = 161 << 10
# Shared memory of a program on sm_90 and sm_100.
_HOPPER_BYTES = 227 << 10
# Queries of one program: with fewer, loads exceed the bandwidth of the L2 cache.
_MANY_QUERIES = 128
# Number of programs that fill a large device twice; contexts are split to reach it.
_TARGET_PROGRAMS = 264


def tile_of(head_dim: int, element_size: int) -> int:
    """Returns the positions per tile: fewer for large heads, to fit shared memory."""
    padded = (1 << (head_dim - 1).bit_length()) * element_size
    # fp32 needs twice the memory: operands, and their halves for three tf32 products.
    needed = 2 * padded if element_size == torch.float32.itemsize else padded
    return max(_LEAST_TILE, min(DECODE_TILE, DECODE_TILE * _TILE_ROW_BYTES // needed))


# Pipeline stages of loops whose loads need the block table first: with three stages one tile is
# loaded while another is computed, with five two are. Taken from the compiler's output.
_STAGES, _MORE_STAGES = 3, 5


def stages_of(head_dim: int, element_size: int, shared_bytes: int) -> int:
    """Returns the pipeline stages of a loop over tiles: more if another tile fits.

    Args:
        shared_bytes: maximum shared memory of a program.
    """
    is_short = head_dim <= 128 and element_size < torch.float32.itemsize
    return _MORE_STAGES if is_short and shared_bytes >= _LARGE_TILES_BYTES else _STAGES


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """Sizes of one program of prompt attention."""

    queries: int
    positions: int
    warps: int


def prompt_tiles_of(
    head_dim: int, element_size: int, shared_bytes: int, max_query_len: int
) -> PromptTiles:
    """Returns the tiles of prompt attention.

    Args:
        shared_bytes: maximum shared memory of a program.
        max_query_len: length of the longest chunk.

    Source: tiles of heads up to 128 are those that PyTorch 2.13's FlexAttention takes on A100, H100
        and B200 before it tunes (`_inductor/template_heuristics/triton.py`).
    """
    tile = tile_of(head_dim, element_size)
    if element_size == torch.float32.itemsize:
        return PromptTiles(tile, tile, 4)
    if shared_bytes < _LARGE_TILES_BYTES:
        # The registers of four warps do not hold a whole tile of large heads.
        small = tile if head_dim <= 128 else tile // 2
        return PromptTiles(small, small, 4)
    if head_dim > 128:
        return PromptTiles(tile, tile, 8)
    if max_query_len <= tile:
        return PromptTiles(tile, tile, 4)
    # Four warps suffice for small heads where matrix units read operands from shared memory.
    few_warps = head_dim <= 64 and shared_bytes >= _HOPPER_BYTES
    return PromptTiles(_MANY_QUERIES, tile, 4 if few_warps else 8)


def num_decode_splits(num_programs: int, longest: int, tile: int = DECODE_TILE) -> int:
    """Returns the number of parts per context, so that programs fill the device.

    Args:
        num_programs: number of programs without splitting.
        longest: positions of the longest context.
        tile: positions of one tile.
    """
    # Rounded to the nearest: of two waves of programs the last ones have the device to themselves.
    wanted = (2 * _TARGET_PROGRAMS + num_programs) // (2 * num_programs)
    # Parts under four tiles cost more in the merge than they save.
    return max(1, min(wanted, longest // (4 * tile)))
