"""Every kernel that computes, at the sizes of real models, to be launched within
`no_device.device`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvmesh.kernels import (
    attention,
    delta_rule,
    draw,
    expert_tiles,
    grouped_gemm,
    layer_ops,
    lightning,
    mamba,
    prompt_attention,
)
from kvmesh.kernels import latent_attention as latent
from kvmesh.kernels.states import StatePlaces
from tests.unit.kernels.no_device import empty

Launching = Callable[[], object]
BF16, FP32 = torch.bfloat16, torch.float32
_INT32, _INT64 = torch.int32, torch.int64


def _prefill(heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16) -> None:
    prompt_attention.paged_prefill_attention(
        empty(600, heads, dim, dtype=dtype),
        empty(64, 4, 2, 16, kv_heads, dim, dtype=dtype),
        3,
        empty(2, 32, dtype=_INT32),
        empty(3, dtype=_INT32),
        empty(2, dtype=_INT32),
        max_query_len=500,
        scale=0.1,
    )


def _decode(heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16) -> None:
    attention.paged_decode_attention(
        empty(3, heads, dim, dtype=dtype),
        empty(64, 4, 2, 16, kv_heads, dim, dtype=dtype),
        3,
        empty(3, 32, dtype=_INT64),
        empty(3, dtype=_INT64),
        max_context_len=0,
        num_splits=16,
        scale=0.1,
    )


def _latent(heads: int, rank: int = 512, rope: int = 64) -> None:
    latent.latent_decode_attention(
        empty(3, heads, rank + rope),
        empty(64, 4, 16, rank + rope),
        3,
        empty(3, 32, dtype=_INT64),
        empty(3, dtype=_INT64),
        scale=0.1,
        rank=rank,
    )


def _experts(rows: int, experts: int, depth: int, columns: int) -> None:
    tiles = expert_tiles.plan_tiles(empty(rows, 8, dtype=_INT64), experts)
    x, weights = empty(rows, depth), empty(experts, columns, depth)
    grouped_gemm.grouped_gemm(x, weights, tiles, top_k=8)


def _places(rows: int, values: int) -> StatePlaces:
    ids, fresh = empty(2, rows, dtype=_INT64), empty(rows, dtype=torch.bool)
    return StatePlaces(empty(64, values, dtype=FP32), ids[0], ids[1], fresh)


def _delta_step(channels: int, heads: int = 32, dim: int = 128) -> None:
    q, k, v = (empty(20, heads, dim, dtype=FP32) for _ in range(3))
    decay, beta = empty(20, heads, channels, dtype=FP32), empty(20, heads, dtype=FP32)
    delta_rule.delta_step(q, k, v, decay, beta, _places(20, heads * dim * dim))


def _delta_scan(channels: int, heads: int = 32, dim: int = 128) -> None:
    q, k, v = (empty(500, heads, dim, dtype=FP32) for _ in range(3))
    decay, beta = empty(500, heads, channels, dtype=FP32), empty(500, heads, dtype=FP32)
    delta_rule.delta_scan(q, k, v, decay, beta, empty(heads, dim, dim, dtype=FP32))


def _lightning(rows: int, is_scan: bool, heads: int = 64, dim: int = 128) -> None:
    q, k, v = (empty(rows, heads, dim, dtype=FP32) for _ in range(3))
    slopes = empty(heads, dtype=FP32)
    if is_scan:
        lightning.lightning_scan(q, k, v, slopes, empty(heads, dim, dim, dtype=FP32))
    else:
        lightning.lightning_step(q, k, v, slopes, _places(rows, heads * dim * dim))


def _mamba(rows: int, is_scan: bool, heads: int = 128, key: int = 128, value: int = 64) -> None:
    q, k = (empty(rows, 1, key, dtype=FP32) for _ in range(2))
    v, decay = empty(rows, heads, value, dtype=FP32), empty(rows, heads, dtype=FP32)
    if is_scan:
        mamba.mamba_scan(q, k, v, decay, empty(heads, key, value, dtype=FP32))
    else:
        mamba.mamba_step(q, k, v, decay, _places(rows, heads * key * value))


def _between_products(hidden: int, inner: int, heads: int, kv_heads: int) -> None:
    x, angles = empty(5, hidden), empty(5, 1, 128)
    layer_ops.add_rms_norm(x, x, empty(hidden), 1e-6)
    layer_ops.add_layer_norm(x, x, empty(hidden), empty(hidden), 1e-6)
    layer_ops.silu_and_mul(empty(5, 2 * inner))
    total = heads + kv_heads
    layer_ops.rope_and_write(
        empty(5, total + kv_heads, 128),
        empty(total, 128),
        1e-6,
        angles,
        angles,
        empty(9, 4, 2, 16, kv_heads, 128),
        3,
        empty(5, dtype=_INT64),
    )


def _draw(vocab: int) -> None:
    keys = empty(3, 2, dtype=_INT32)
    draw.draw(empty(3, vocab, dtype=FP32), keys[:, 0], keys[:, 1], keys[:, 0])


LAUNCHES: dict[str, Launching] = {
    "prefill, Llama 3 8B": partial(_prefill, 32, 8, 128),
    "prefill, Qwen3-Next": partial(_prefill, 16, 2, 256),
    "prefill, gpt-oss": partial(_prefill, 64, 8, 64),
    "prefill, Llama 3 8B, fp32": partial(_prefill, 32, 8, 128, FP32),
    "decode, Llama 3 8B": partial(_decode, 32, 8, 128),
    "decode, Qwen3-Next": partial(_decode, 16, 2, 256),
    "decode, gpt-oss": partial(_decode, 64, 8, 64),
    "decode, Llama 3 8B, fp32": partial(_decode, 32, 8, 128, FP32),
    "latents, DeepSeek-V3": partial(_latent, 128),
    "latents, Kimi Linear": partial(_latent, 32),
    "experts, few rows, Qwen3-30B-A3B": partial(_experts, 4, 128, 2048, 768),
    "experts, many rows, Qwen3-30B-A3B": partial(_experts, 512, 128, 2048, 768),
    "experts, most rows, Qwen3-30B-A3B": partial(_experts, 4096, 128, 2048, 768),
    "experts, few rows, Qwen3-Next": partial(_experts, 64, 512, 2048, 512),
    "delta rule step, Qwen3-Next": partial(_delta_step, 1),
    "delta rule prefill, Qwen3-Next": partial(_delta_scan, 1),
    "KDA step, Kimi Linear": partial(_delta_step, 128),
    "KDA prefill, Kimi Linear": partial(_delta_scan, 128),
    "lightning step, MiniMax-Text-01": partial(_lightning, 20, False),
    "lightning prefill, MiniMax-Text-01": partial(_lightning, 500, True),
    "Mamba-2 step, Granite 4 Small": partial(_mamba, 20, False),
    "Mamba-2 prefill, Granite 4 Small": partial(_mamba, 500, True),
    "between products, Llama 3 8B": partial(_between_products, 4096, 14_336, 32, 8),
    "draw, Llama 3": partial(_draw, 128_256),
}
"""By kernel and model; some launch more than one kernel."""
