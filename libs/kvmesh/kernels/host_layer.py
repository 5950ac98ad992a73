"""`layer.h` on torch tensors: the halves of a decoder layer in one call each, for a few rows.

What is computed is what the parts compute when they are called one by one, to the bit; a step of
one row has hundreds of them, and each costs as much to call as to run.
Tests: tests/unit/kernels/test_host_layer.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.kernels import host
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.linear import Linear


def fits(x: Tensor, first: Linear, second: Linear) -> bool:
    """Whether two products of these rows, and what is between, can be one call.

    Args:
        x: [rows, inputs].
        second: of what comes from the first.
    """
    return bool(first.panels and second.panels) and 0 < len(x) <= host.most_rows(x.dtype)


def has_gated_mlp(x: Tensor, gate_up: Linear, down: Linear) -> bool:
    """Whether `gated_mlp` takes these rows."""
    return fits(x, gate_up, down) and gate_up.weight.shape[0] % (2 * host.PANEL) == 0


def gated_mlp(x: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """`down(silu_and_mul(gate_up(x)))`.

    Args:
        x: [rows, hidden], contiguous; `has_gated_mlp` was asked.

    Returns:
        [rows, hidden].
    """
    assert x.is_contiguous()
    rows, hidden = x.shape
    out = torch.empty_like(x)
    status = host.function_of("gated_mlp", x.dtype)(
        x.data_ptr(),
        gate_up.panels,
        _address(gate_up.bias),
        down.panels,
        _address(down.bias),
        out.data_ptr(),
        rows,
        hidden,
        gate_up.weight.shape[0] // 2,
        torch.get_num_threads(),
    )
    assert status == 0, "too many rows"
    return out


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """KV of sequences that compute one position each.

    Attributes:
        kv: the pool.
        slots: [rows] int64, of the rows' own positions.
        tables: [rows, blocks] int64.
        lens: [rows] int64, positions with the row's own.
    """

    kv: Tensor
    slots: Tensor
    tables: Tensor
    lens: Tensor


def attention(
    x: Tensor,
    qkv: Linear,
    output: Linear,
    own: DecodeRows,
    layer: int,
    spec: HeadSpec,
    rope: RopeRows,
) -> Tensor:
    """Projects rows, turns their heads and writes their KV, attends, and projects back.

    Args:
        x: [rows, hidden], contiguous; `fits` was asked, and of the pool `host.has_decode` and
            `host.has_rope`.

    Returns:
        [rows, hidden].
    """
    assert x.is_contiguous()
    rows, hidden = x.shape
    kv, head_dim, kv_heads = own.kv, own.kv.shape[5], own.kv.shape[4]
    out = torch.empty_like(x)
    status = host.function_of("attention_layer", x.dtype)(
        x.data_ptr(),
        qkv.panels,
        _address(qkv.bias),
        output.panels,
        _address(output.bias),
        out.data_ptr(),
        rows,
        hidden,
        _address(spec.qk_norm),
        spec.norm_eps,
        rope.cos.data_ptr(),
        rope.signed_sin.data_ptr(),
        kv.data_ptr() + layer * kv.stride(1) * kv.element_size(),
        own.slots.data_ptr(),
        own.tables.data_ptr(),
        own.lens.data_ptr(),
        _address(spec.sinks),
        own.tables.shape[1],
        qkv.weight.shape[0] // head_dim - 2 * kv_heads,
        head_dim,
        spec.window,
        spec.scale,
        *host.pool_shape(kv),
        torch.get_num_threads(),
    )
    assert status == 0, "fits and has_decode were not asked"
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
