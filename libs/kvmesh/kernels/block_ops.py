"""Equal pieces of memory, such as KV blocks, copied in one call: Triton on CUDA, torch elsewhere.

Gather, scatter and copies between pools are the same call with other places.
Tests: tests/unit/kernels/test_block_ops.py, tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor


def _triton() -> ModuleType:
    # Triton costs half a second to import and is only needed where there is a device.
    from kvmesh.kernels import block_copy  # noqa: PLC0415

    return block_copy


def copy_pieces(target: Tensor, source: Tensor, places: Tensor, size: int) -> None:
    """Copies `size` bytes from each place of `source` to its place of `target`, in any order.

    Args:
        target, source: [bytes] uint8, contiguous, on one device or on two that reach each other;
            `target` is changed in place.
        places: [pieces, 2] int64 on the host: first byte in the target and in the source. Pieces
            do not overlap in the target, and lie in both.
    """
    if target.is_cuda:
        _triton().copy_pieces(target, source, places, size)
    else:
        copy_one_by_one(target, source, places, size)


def copy_one_by_one(target: Tensor, source: Tensor, places: Tensor, size: int) -> None:
    """The twin of `copy_pieces`: a copy per piece, on any device."""
    for to, begin in places.tolist():
        target[to : to + size].copy_(source[begin : begin + size])
