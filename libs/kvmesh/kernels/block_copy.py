"""Copies many pieces of equal size by one kernel: gathers blocks of a pool into a buffer, scatters
them out of one, or moves them between pools.

The twin is `block_ops.copy_pieces`. Tests: tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD_BYTES = 8
_VECTOR_BYTES = 16
"""Bytes that one thread moves at once if everything is aligned to them."""
_TILE_WORDS = 2048
_TILE_BYTES = 2048


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    target_ptr,
    source_ptr,
    places_ptr,
    size,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    # One program copies one tile of one piece. Places and size are in elements of the pointers.
    place = places_ptr + 2 * tl.program_id(0).to(tl.int64)
    to, begin = tl.load(place), tl.load(place + 1)
    if ALIGNED:  # the compiler cannot infer the alignment of loaded values
        to, begin = tl.multiple_of(to, 2), tl.multiple_of(begin, 2)
    offsets = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = offsets < size
    values = tl.load(source_ptr + begin + offsets, mask=inside)
    tl.store(target_ptr + to + offsets, values, mask=inside)


def copy_pieces(target: Tensor, source: Tensor, places: Tensor, size: int) -> None:
    """See `block_ops.copy_pieces`.

    One launch for any number of pieces. If sizes, places and memory are multiples of 16 bytes, it
    copies words of that size.
    """
    assert target.dtype == source.dtype == torch.uint8, "copies bytes"
    if len(places) == 0 or size == 0:
        return
    word, tile = _words(target, source, places, size)
    if word > 1:
        target, source = target.view(torch.int64), source.view(torch.int64)
    on_device = torch.div(places, word, rounding_mode="floor").to(target.device)
    elements = size // word
    grid = (len(places), triton.cdiv(elements, tile))
    _copy_kernel[grid](target, source, on_device, elements, ALIGNED=word > 1, TILE=tile)


def _words(target: Tensor, source: Tensor, places: Tensor, size: int) -> tuple[int, int]:
    """Returns the bytes of an element, and the elements of a tile."""
    numbers = target.data_ptr() | source.data_ptr() | size
    lengths = target.numel() | source.numel()
    is_aligned = numbers % _VECTOR_BYTES == 0 and lengths % _WORD_BYTES == 0
    if is_aligned and not (places % _VECTOR_BYTES).any():
        return _WORD_BYTES, _TILE_WORDS
    return 1, _TILE_BYTES
