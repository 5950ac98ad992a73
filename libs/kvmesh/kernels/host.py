"""`host.h` on torch tensors. The twins are in reference.py and attention_reference.py; layer_ops.py
and dispatch.py choose between them.

Tests: tests/unit/kernels/test_host.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvmesh.kernels.host_library import load_host_library

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_VECTOR = 16
_HEAD_DIMS = frozenset({16, 32, 64, 128, 256, 512})

_P, _I, _F, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_POOL = (_I, _I, _I, _I)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add_rms_norm": (_P, _P, _P, _P, _I, _I, _F, _THREADS),
    "silu_and_mul": (_P, _P, _I, _I, _THREADS),
    "rope_and_write": (_P, _P, _F, _P, _P, _P, _P, _I, _I, _I, *_POOL, _THREADS),
    "few_rows": (_P, _P, _P, _P, _I, _I, _I, _THREADS),
    "most_rows": (),
    "any_rows": (),
    "panel_width": (),
    "gated_mlp": (_P, _P, _P, _I, _THREADS),
    "attention_layer": (_P, _P, _P, _P, _P, _P, _P, _THREADS),
    "decoder_layers": (_P, _I, _P, _P, _P, _P, _P, _P, _P, _THREADS),
    "head_logits": (_P, _P, _P, _P, _I, _THREADS),
    "decode_attention": (
        *(_P, _I, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _F, _F),
        *_POOL,
        _THREADS,
    ),
    "prefill_attention": (
        *(_P, _I, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _F, _F),
        *_POOL,
        *(_THREADS, _P),
        _THREADS,
    ),
    "delta_rule": (_P, _I, _P, _I, _P, _I, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _THREADS),
    "latent_decode": (_P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _F, _THREADS),
    "lightning": (_P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _THREADS),
}
_WITH_STATUS = frozenset(
    {
        *("decode_attention", "few_rows", "most_rows", "any_rows", "panel_width"),
        *("gated_mlp", "attention_layer", "decoder_layers", "head_logits"),
    }
)
PANEL = 64


@functools.cache
def function_of(name: str, dtype: torch.dtype) -> Callable[..., int]:
    """Returns a function of the library, which must be loaded."""
    loaded = load_host_library()
    assert loaded is not None
    function = getattr(loaded.library, f"{name}_{_NAMES[dtype]}")
    function.argtypes = _ARGUMENTS[name]
    function.restype = ctypes.c_int if name in _WITH_STATUS else None
    found: Callable[..., int] = function
    return found


def has_vectors(x: Tensor) -> bool:
    """Returns whether the library can process rows of this tensor."""
    return (
        x.device.type == "cpu"
        and x.dtype in _NAMES
        and x.shape[-1] % _VECTOR == 0
        and load_host_library() is not None
    )


def has_rope(x: Tensor) -> bool:
    """Returns whether the library can rotate heads (the last axis of `x`)."""
    return x.shape[-1] % (2 * _VECTOR) == 0 and has_vectors(x)


def has_attention(kv: Tensor) -> bool:
    """Returns whether attention over this pool is compiled."""
    return kv.shape[-1] in _HEAD_DIMS and has_vectors(kv)


def prefill_head_dim(x: Tensor, dim: int) -> int | None:
    """Returns the smallest head size from `dim` on that `has_attention` accepts, or None.

    Args:
        x: a tensor of the intended dtype and device.
    """
    fitting = [size for size in sorted(_HEAD_DIMS) if size >= dim]
    return fitting[0] if fitting and has_attention(x.new_empty(0, fitting[0])) else None


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`; tensors are contiguous."""
    assert x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    out = torch.empty_like(x)
    function_of("add_rms_norm", x.dtype)(
        x.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        len(x),
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_and_mul`; `gate_up` is contiguous."""
    assert gate_up.is_contiguous()
    rows, columns = gate_up.shape
    out = gate_up.new_empty(rows, columns // 2)
    function_of("silu_and_mul", gate_up.dtype)(
        gate_up.data_ptr(), out.data_ptr(), rows, columns // 2, torch.get_num_threads()
    )
    return out


def pool_shape(kv: Tensor) -> tuple[int, int, int, int]:
    """Returns the strides of a block and from keys to values, the block size, and the KV heads."""
    return kv.stride(0), kv.stride(2), kv.shape[3], kv.shape[4]


def rope_and_write(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    signed_sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
) -> None:
    """See `reference.rope_and_write`; tensors are contiguous."""
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, signed_sin))
    rows, heads, head_dim = qkv.shape
    function_of("rope_and_write", qkv.dtype)(
        qkv.data_ptr(),
        None if qk_norm is None else qk_norm.data_ptr(),
        eps,
        cos.data_ptr(),
        signed_sin.data_ptr(),
        kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
        slots.data_ptr(),
        rows,
        heads - 2 * kv.shape[4],
        head_dim,
        *pool_shape(kv),
        torch.get_num_threads(),
    )


def decode_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None,
    cap: float = 0.0,
) -> Tensor:
    """Computes attention of one query per sequence over its blocks, read in place.

    Args:
        q: [sequences, heads, head_dim]; heads and their elements contiguous.
        tables: [sequences, blocks] int64.
        lens: [sequences] int64, at least 1.
        window: number of latest positions that a query sees, its own included; 0 for all.
        sinks: [heads] fp32 or None, see `attention_reference.decode_attention`.
        cap: bound of soft-capping, see `reference.capped`; 0 for none.

    Returns:
        [sequences, heads, head_dim].
    """
    sequences, heads, head_dim = q.shape
    assert q.stride()[1:] == (head_dim, 1)
    out = q.new_empty(q.shape)
    status = function_of("decode_attention", q.dtype)(
        q.data_ptr(),
        q.stride(0),
        kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
        out.data_ptr(),
        tables.data_ptr(),
        lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        tables.shape[1],
        sequences,
        heads,
        head_dim,
        window,
        scale,
        cap,
        *pool_shape(kv),
        torch.get_num_threads(),
    )
    assert status == 0, "has_attention was not asked"
    return out


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    tables: Tensor,
    starts: Tensor,
    lens: Tensor,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None,
    cap: float = 0.0,
) -> Tensor:
    """Computes causal attention of chunks over their cached prefixes and themselves, in place.

    A row's result depends neither on the split of its prompt into chunks nor on other sequences.

    Args:
        q: [rows, heads, head_dim]; heads and their elements contiguous. KV of the rows is written.
        tables: [sequences, blocks] int64.
        starts: [sequences + 1] int64, first row of each, then the number of rows.
        lens: [sequences] int64, cached positions and the chunk's own.
        window: number of latest positions that a query sees, its own included; 0 for all.
        sinks: [heads] fp32 or None, see `attention_reference.decode_attention`.
        cap: bound of soft-capping, see `reference.capped`; 0 for none.

    Returns:
        [rows, heads, head_dim].
    """
    out = q.new_empty(q.shape)
    spans = (tables, starts, lens)
    _prefill(q, kv, layer, spans, out, None, scale, window=window, sinks=sinks, cap=cap)
    return out


def partial_prefill(
    q: Tensor,
    kv: Tensor,
    layer: int,
    blocks: Tensor,
    num_positions: int,
    scale: float,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Computes attention of one sequence's queries over a part of its context, read in place.

    Args:
        q: [queries, heads, head_dim]; heads and their elements contiguous.
        blocks: [blocks] int64, blocks that hold the positions.
        causal: whether the queries belong to the last positions and see none after their own;
            otherwise they see all.

    Returns:
        [queries, heads, head_dim], and [queries, heads] fp32, the log of the sums of exponentials.
    """
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)
    starts = torch.tensor([0, len(q)], dtype=torch.int64)
    spans = (blocks[None], starts, torch.tensor([num_positions], dtype=torch.int64))
    _prefill(q, kv, layer, spans, out, lse, scale, causal=causal)
    return out, lse


def _prefill(
    q: Tensor,
    kv: Tensor,
    layer: int,
    spans: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    cap: float = 0.0,
    causal: bool = True,
) -> None:
    """`spans` are tables, starts and lens of `prefill_attention`."""
    _, heads, head_dim = q.shape
    tables, starts, lens = spans
    assert q.stride()[1:] == (head_dim, 1)
    assert head_dim in _HEAD_DIMS
    function_of("prefill_attention", q.dtype)(
        q.data_ptr(),
        q.stride(0),
        kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
        out.data_ptr(),
        tables.data_ptr(),
        starts.data_ptr(),
        lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        tables.shape[1],
        len(lens),
        heads,
        head_dim,
        window,
        scale,
        cap,
        *pool_shape(kv),
        causal,
        None if lse is None else lse.data_ptr(),
        torch.get_num_threads(),
    )


@functools.cache
def most_rows(dtype: torch.dtype) -> int:
    """Returns the most rows for which `few_rows` is faster on this CPU; needs the library."""
    return function_of("most_rows", dtype)()


def takes_any_rows(weight: Tensor) -> bool:
    """Returns whether `few_rows` should compute any number of rows with such a weight.

    True on CPUs with 256-bit vectors, and for bf16 on CPUs with AMX tiles, for which oneDNN has
    other weight layouts. Also true for bf16 on CPUs that cannot multiply it; the products are fp32
    then.
    """
    return has_vectors(weight) and bool(function_of("any_rows", weight.dtype)())


def in_panels(weight: Tensor) -> Tensor | None:
    """Returns a weight in the layout of `few_rows`; None if its dtype or shape has none.

    Args:
        weight: [outputs, inputs], contiguous.

    Returns:
        [outputs / width, inputs / lane, width, lane], where lane is the number of values in four
        bytes and width 64 on CPUs with 512-bit vectors, else 16.
    """
    outputs, inputs = weight.shape
    if outputs % PANEL or inputs % _VECTOR or not has_vectors(weight):
        return None
    lane = 4 // weight.element_size()
    width = function_of("panel_width", weight.dtype)()
    panels = weight.view(outputs // width, width, inputs // lane, lane)
    return panels.permute(0, 2, 1, 3).contiguous()


def few_rows(x: Tensor, panels: int, bias: Tensor | None, outputs: int) -> Tensor:
    """Multiplies up to `most_rows` rows by a weight, or any number if `takes_any_rows`.

    The result of a row does not depend on other rows.

    Args:
        x: [rows, inputs], contiguous.
        panels: address of the weight in the layout of `in_panels`, dtype of `x`.
        bias: [outputs] or None.

    Returns:
        [rows, outputs].
    """
    assert x.is_contiguous()
    rows, inputs = x.shape
    out = x.new_empty(rows, outputs)
    status = function_of("few_rows", x.dtype)(
        x.data_ptr(),
        panels,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        outputs,
        inputs,
        torch.get_num_threads(),
    )
    assert status == 0, "too many rows"
    return out
