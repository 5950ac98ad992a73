"""Copies pieces of equal size, such as KV blocks, in one call: Triton on CUDA, torch elsewhere.

Gather, scatter and copies between pools are the same call with other places.
Tests: tests/unit/kernels/test_block_ops.py, tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor


def _triton() -> ModuleType:
    # Triton takes half a second to import and is needed only with a device.
    from kvmesh.kernels import block_copy  # noqa: PLC0415

    return block_copy


def copy_pieces(target: Tensor, source: Tensor, places: Tensor, size: int) -> None:
    """Copies `size` bytes from each place of `source` to its place of `target`, in any order.

    Args:
        target, source: [bytes] uint8, contiguous, on one device or on two with peer access;
            `target` is changed in place.
        places: [pieces, 2] int64 on the host: first byte in the target and in the source. Pieces
            lie within both tensors and do not overlap in the target.
    """
    if target.is_cuda:
        _triton().copy_pieces(target, source, places, size)
    else:
        copy_one_by_one(target, source, places, size)


def copy_one_by_one(target: Tensor, source: Tensor, places: Tensor, size: int) -> None:
    """Twin of `copy_pieces`: one copy per piece, on any device."""
    for to, begin in places.tolist():
        target[to : to + size].copy_(source[begin : begin + size])
