"""Triton kernels of latents, states and experts, under the interpreter. Run by
test_triton_kernels.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvmesh.engine.layers import GatedMlp, StackedExperts, make_sparse_mlp
from kvmesh.kernels import (
    delta_rule,
    grouped_gemm,
    latent,
    latent_attention,
    layer_ops,
    lightning,
    lightning_reference,
    linear_reference,
    reference,
)
from kvmesh.kernels.linear import make_linear

# The interpreter's own handling of loop bounds, under the numpy that it needs.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_splits", "by_length"), [(1, False), (3, False), (3, True)])
def test_latent_decode(num_splits: int, by_length: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    size, rank, rope, heads = 8, 24, 8, 18
    tables, lens = torch.tensor([[3, 9, 1, 7], [5, 2, 0, 0]]), torch.tensor([29, 9])
    kv = torch.full((10, 2, size, rank + rope), torch.nan, dtype=dtype)
    for table, length in zip(tables, lens, strict=True):
        for position in range(int(length)):
            block = table[position // size]
            kv[block, 1, position % size] = torch.randn(rank + rope).to(dtype)
    q = torch.randn(2, heads, rank + rope).to(dtype)
    found = latent_attention.latent_decode_attention(
        q,
        kv,
        1,
        tables,
        lens,
        scale=0.2,
        rank=rank,
        num_splits=num_splits,
        by_length=by_length,
    )
    wanted = latent.latent_decode_attention(q, kv, 1, tables, lens, scale=0.2, rank=rank)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def rows(
    count: int, heads: int, key_dim: int, value_dim: int, channels: int = 1
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(count)
    q, k = (linear_reference.l2_normalize(torch.randn(count, heads, key_dim)) for _ in range(2))
    v, beta = torch.randn(count, heads, value_dim), torch.rand(count, heads)
    return q, k, v, -3 * torch.rand(count, heads, channels), beta


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "channels"), [(16, 16, 1), (24, 40, 1), (16, 16, 16), (24, 40, 24)]
)
def test_delta_step(key_dim: int, value_dim: int, channels: int) -> None:
    q, k, v, decay, beta = rows(3, 2, key_dim, value_dim, channels)
    state = torch.randn(3, 2, key_dim, value_dim)
    found = delta_rule.delta_step(q, k, v, decay, beta, state)
    wanted = linear_reference.delta_step(q, k, v, decay, beta, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 24])
@pytest.mark.parametrize("positions", [1, 16, 37])
def test_delta_scan(positions: int, channels: int) -> None:
    q, k, v, decay, beta = rows(positions, 2, 24, 40, channels)
    state = torch.randn(2, 24, 40)
    found = delta_rule.delta_scan(q, k, v, decay, beta, state)
    wanted = linear_reference.delta_scan(q, k, v, decay, beta, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_channels_that_forget_at_once_stay_finite() -> None:
    q, k, v, decay, beta = rows(40, 1, 16, 16, 16)
    state = torch.randn(1, 16, 16)
    found = delta_rule.delta_scan(q, k, v, 70 * decay, beta, state)
    wanted = linear_reference.delta_scan(q, k, v, 70 * decay, beta, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (24, 40)])
def test_lightning_step(key_dim: int, value_dim: int) -> None:
    q, k, v, _, _ = rows(3, 2, key_dim, value_dim)
    state, slopes = torch.randn(3, 2, key_dim, value_dim), torch.tensor([2.0, 0.01])
    found = lightning.lightning_step(q, k, v, slopes, state)
    wanted = lightning_reference.lightning_step(q, k, v, slopes, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [1, 32, 75])
def test_lightning_scan(positions: int) -> None:
    q, k, v, _, _ = rows(positions, 2, 24, 40)
    state, slopes = torch.randn(2, 24, 40), torch.tensor([2.0, 0.01])
    found = lightning.lightning_scan(q, k, v, slopes, state)
    wanted = lightning_reference.lightning_scan(q, k, v, slopes, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_delta_scan_of_equal_keys() -> None:
    # The worst system to solve: every change undoes the one before.
    q, k, v, decay, beta = rows(32, 1, 16, 16)
    k, decay, beta = k[:1].expand(32, 1, 16), torch.zeros_like(decay), torch.ones_like(beta)
    state = torch.zeros(1, 16, 16)
    found = delta_rule.delta_scan(q, k, v, decay, beta, state)
    wanted = linear_reference.delta_scan(q, k, v, decay, beta, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 5, 40, 150])
def test_grouped_gemm(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    experts, top_k, depth, columns = 5, 2, 40, 72
    x, weights = torch.randn(num_rows, depth), torch.randn(experts, columns, depth)
    # The last expert is never chosen.
    chosen = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(num_rows)])
    tiles = grouped_gemm.plan_tiles(chosen, experts)
    assert (tiles.shape is grouped_gemm.MANY_ROWS) == (num_rows == 150)
    of_choice = tiles.order // top_k
    found = grouped_gemm.grouped_gemm(x, weights, of_choice, tiles)
    sorted_experts = chosen.flatten()[tiles.order]
    wanted = grouped_gemm.grouped_product(x, weights, of_choice, sorted_experts)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    one_by_one = torch.stack(
        [weights[e] @ x[r] for e, r in zip(sorted_experts, of_choice, strict=True)]
    )
    torch.testing.assert_close(wanted, one_by_one, rtol=1e-4, atol=1e-4)


def test_stacked_experts_equal_experts_one_by_one() -> None:
    torch.manual_seed(2)
    gate_up, down = torch.randn(4, 48, 16), torch.randn(4, 16, 24)
    pairs = zip(gate_up, down, strict=True)
    experts = [
        GatedMlp(make_linear(inner), make_linear(outer), reference.silu_and_mul)
        for inner, outer in pairs
    ]
    router = make_linear(torch.randn(4, 16))
    route = partial(layer_ops.route, top_k=2, normalize=True)
    h = torch.randn(9, 16)
    wanted = make_sparse_mlp(router, route, experts).run(h)
    stacked = StackedExperts(gate_up, down, reference.silu_and_mul)
    found = stacked.run(h, *route(router(h)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
