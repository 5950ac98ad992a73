"""Cases and checks of the steps between matrix products, shared by host, interpreter and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvmesh.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-6


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == expected.dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def check_add_rms_norm(
    op: Callable[..., Tensor], rows: int, has_delta: bool, dtype: torch.dtype, device: str
) -> None:
    x = random(rows, 48, dtype=dtype, device=device)
    delta = random(rows, 48, dtype=dtype, device=device, seed=1) if has_delta else None
    weight = random(48, dtype=dtype, device=device, seed=2)
    expected_x = x.clone()
    expected = reference.add_rms_norm(expected_x, delta, weight, EPS)
    assert_close(op(x, delta, weight, EPS), expected)
    assert torch.equal(x, expected_x), "the stream is the rounded sum"


def check_add_layer_norm(
    op: Callable[..., Tensor], rows: int, has_delta: bool, dtype: torch.dtype, device: str
) -> None:
    # A mean far from zero, and a size that fills no tile.
    x = random(rows, 48, dtype=dtype, device=device) + 2
    delta = random(rows, 48, dtype=dtype, device=device, seed=1) if has_delta else None
    weight, bias = (random(48, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    expected_x = x.clone()
    expected = reference.add_layer_norm(expected_x, delta, weight, bias, EPS)
    assert_close(op(x, delta, weight, bias, EPS), expected)
    assert torch.equal(x, expected_x), "the stream is the rounded sum"


def check_silu_and_mul(
    op: Callable[[Tensor], Tensor], rows: int, dtype: torch.dtype, device: str
) -> None:
    gate_up = random(rows, 2 * 48, dtype=dtype, device=device) * 8
    assert_close(op(gate_up), reference.silu_and_mul(gate_up))


def check_rope_and_write(
    op: Callable[..., None], has_norm: bool, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """Rows of several blocks; the rest of the pool stays as it was."""
    heads, kv_heads, block_size, slots = 5, 2, 4, [13, 2, 3, 8]
    layer, rows = 1, len(slots)
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    qkv = random(rows, heads + 2 * kv_heads, head_dim, **made)
    qk_norm = random(heads + kv_heads, head_dim, **made, seed=1) if has_norm else None
    angles = random(rows, 1, head_dim // 2, dtype=torch.float32, device=device, seed=2) * 3
    cos = angles.cos().repeat(1, 1, 2).to(dtype)
    signed_sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)
    kv = random(5, 2, 2, block_size, kv_heads, head_dim, **made, seed=3)
    twin_qkv, twin_kv = qkv.clone(), kv.clone()
    places = torch.tensor(slots, device=device)
    reference.rope_and_write(twin_qkv, qk_norm, EPS, cos, signed_sin, twin_kv, layer, places)
    before = kv.clone()
    op(qkv, qk_norm, EPS, cos, signed_sin, kv, layer, places)
    assert_close(qkv, twin_qkv)
    assert_close(kv, twin_kv)
    untouched = torch.ones(5, 2, block_size, dtype=torch.bool)
    for slot in slots:
        untouched[slot // block_size, layer, slot % block_size] = False
    same = (kv == before).all(dim=-1).all(dim=-1).cpu()
    assert torch.equal(same.all(dim=2), untouched), "only the rows' slots change"
