"""Other implementations of attention, on the inputs of `kernel_cases`: torch's SDPA on contiguous
keys and values (no paging, its best backend), FlexAttention, and FlashInfer where it is installed.
All take contexts that end with a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernel_case import BLOCK_SIZE, Compute, KernelCase

SDPA = "SDPA"
_WORKSPACE_BYTES = 256 << 20
_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)


def rivals(case: KernelCase, *, slow: bool) -> Iterator[tuple[str, Callable[[], Compute]]]:
    """Names, and what makes each call ready; both it and the call may fail on such inputs.

    Args:
        slow: those that compile something of their own first, or the others.
    """
    if case.name == "paged decode":
        q, k, v = _contiguous_decode(case.tensors)
        if not slow:
            for backend in _BACKENDS:
                yield f"{SDPA} {backend.name.lower()}", partial(_sdpa, q, k, v, None, backend)
            return
        for name, uses_tensor_cores in (("FlashInfer", False), ("FlashInfer, tensor cores", True)):
            yield name, partial(_flashinfer_decode, case.tensors, uses_tensor_cores)
        yield "FlexAttention", partial(_flex, q, k, v, causal=False)
    elif case.name == "paged prefill":
        q, k, v = _contiguous_prefill(case.tensors)
        if not slow:
            mask = causal_lower_right(q.shape[2], k.shape[2])
            for backend in _BACKENDS:
                yield f"{SDPA} {backend.name.lower()}", partial(_sdpa, q, k, v, mask, backend)
            return
        yield "FlashInfer", partial(_flashinfer_prefill, case.tensors)
        if q.shape[2] == k.shape[2]:
            yield "FlexAttention", partial(_flex, q, k, v, causal=True)


def largest_difference(ours: Any, theirs: Any) -> float:
    """Of two results, tensors or tuples of them, as a share of the second's largest value."""
    if isinstance(ours, Tensor):
        ours, theirs = (ours,), (theirs,)
    shares = []
    for one, other in zip(ours, theirs, strict=True):
        gap = (one.double() - other.double()).abs().nan_to_num(nan=float("inf")).max()
        shares.append(float(gap / other.double().abs().max().clamp_min(1e-30)))
    return max(shares)


def is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether a rival computed what the kernel did, up to the rounding of half precision.

    Args:
        ours: [rows, heads, head_dim].
        theirs: the same, or [sequences, heads, rows of each, head_dim].
    """
    if theirs.dim() == 4:
        theirs = theirs.transpose(1, 2).flatten(0, 1)
    return torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def _contiguous_decode(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """[sequences, heads, positions, head_dim] each."""
    gathered = tensors["kv"][:, 0][tensors["tables"].long()]
    k, v = gathered.permute(2, 0, 4, 1, 3, 5).flatten(3, 4).contiguous()
    return tensors["q"][:, :, None], k, v


def _contiguous_prefill(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    slots, kv = tensors["slots"], tensors["kv"]
    flat = kv[:, 0].transpose(0, 1).flatten(1, 2)
    k, v = flat[:, slots].permute(0, 1, 3, 2, 4).contiguous()
    heads, head_dim = tensors["q"].shape[1:]
    q = tensors["q"].view(len(slots), -1, heads, head_dim).transpose(1, 2).contiguous()
    return q, k, v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any, backend: SDPBackend) -> Compute:
    # Repeated heads cost the rival memory that `enable_gqa` saves where a backend has it.
    def compute() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return compute


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Compute:
    from torch.nn.attention.flex_attention import (  # noqa: PLC0415 - compiles on import of dynamo
        create_block_mask,
        flex_attention,
    )

    # For these shapes alone: one for any shape is slower.
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        length = q.shape[2]
        mask = create_block_mask(
            lambda _b, _h, row, column: row >= column, None, None, length, length, device=q.device
        )
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer_decode(tensors: dict[str, Tensor], uses_tensor_cores: bool) -> Compute:
    import flashinfer  # type: ignore[import-not-found] # noqa: PLC0415 - optional

    q, kv, tables = tensors["q"], tensors["kv"][:, 0], tensors["tables"]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q), "NHD", use_tensor_cores=uses_tensor_cores
    )
    wrapper.plan(
        *_flashinfer_tables(tables),
        q.shape[1],
        kv.shape[3],
        q.shape[2],
        BLOCK_SIZE,
        q_data_type=q.dtype,
        kv_data_type=kv.dtype,
    )
    return lambda: wrapper.run(q, kv)


def _flashinfer_prefill(tensors: dict[str, Tensor]) -> Compute:
    import flashinfer  # noqa: PLC0415 - optional

    q, kv, tables = tensors["q"], tensors["kv"][:, 0], tensors["tables"]
    new = len(q) // len(tables)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "NHD")
    wrapper.plan(
        torch.arange(0, len(q) + 1, new, dtype=torch.int32, device=q.device),
        *_flashinfer_tables(tables),
        q.shape[1],
        kv.shape[3],
        q.shape[2],
        BLOCK_SIZE,
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=kv.dtype,
    )
    return lambda: wrapper.run(q, kv)


def _workspace(q: Tensor) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _flashinfer_tables(tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where each context's blocks begin, the blocks, and positions in the last one: all of it."""
    count, blocks = tables.shape
    return (
        torch.arange(0, count * blocks + 1, blocks, dtype=torch.int32, device=tables.device),
        tables.flatten(),
        torch.full((count,), BLOCK_SIZE, dtype=torch.int32, device=tables.device),
    )
