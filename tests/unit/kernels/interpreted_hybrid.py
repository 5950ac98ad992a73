"""Triton kernels of latents, states and experts, under the interpreter. Run by
test_triton_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvmesh.engine import lightning as lightning_layers
from kvmesh.engine import linear_attention
from kvmesh.engine import mamba as mamba_layers
from kvmesh.engine.config import LinearConfig
from kvmesh.engine.layers import GatedMlp, StackedExperts, make_sparse_mlp
from kvmesh.engine.linear_attention import DeltaInputs
from kvmesh.kernels import (
    delta_rule,
    expert_tiles,
    grouped_gemm,
    latent,
    latent_attention,
    layer_ops,
    lightning,
    lightning_reference,
    linear_reference,
    mamba,
    mamba_reference,
    reference,
)
from kvmesh.kernels.linear import make_linear
from kvmesh.kernels.states import PlacedRecurrence, Recurrence, StatePlaces

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


def placed(state: torch.Tensor) -> tuple[StatePlaces, torch.Tensor]:
    """States in every other block of a pool, to be written to the others; and those."""
    field = torch.full((2 * len(state) + 1, 3 + state[0].numel()), torch.nan)
    own = field[:, 2:-1]
    places = torch.arange(2 * len(state)).view(-1, 2)
    own[places[:, 0]] = state.flatten(1)
    fresh = torch.zeros(len(state), dtype=torch.bool)
    return StatePlaces(own, places[:, 0], places[:, 1], fresh), field


def after_of(places: StatePlaces, field: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    assert field[:, :2].isnan().all(), "what is beside the states is nobody's"
    assert field[:, -1].isnan().all()
    return places.field[places.live].view(like.shape)


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
    places, field = placed(state)
    out = delta_rule.delta_step(q, k, v, decay, beta, places)
    found = out, after_of(places, field, state)
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
    places, field = placed(state)
    out = lightning.lightning_step(q, k, v, slopes, places)
    found = out, after_of(places, field, state)
    wanted = lightning_reference.lightning_step(q, k, v, slopes, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [1, 32, 75])
def test_lightning_scan(positions: int) -> None:
    q, k, v, _, _ = rows(positions, 2, 24, 40)
    state, slopes = torch.randn(2, 24, 40), torch.tensor([2.0, 0.01])
    found = lightning.lightning_scan(q, k, v, slopes, state)
    wanted = lightning_reference.lightning_scan(q, k, v, slopes, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def mamba_rows(
    count: int, groups: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    q, k = (torch.randn(count, groups, 24) for _ in range(2))
    return q, k, torch.randn(count, heads, 40), -3 * torch.rand(count, heads)


@pytest.mark.parametrize(("groups", "heads"), [(1, 4), (2, 2), (2, 6)])
def test_mamba_step(groups: int, heads: int) -> None:
    inputs, state = mamba_rows(3, groups, heads), torch.randn(3, heads, 24, 40)
    places, field = placed(state)
    out = mamba.mamba_step(*inputs, places)
    found = out, after_of(places, field, state)
    wanted = mamba_reference.mamba_step(*inputs, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_states_in_place_start_at_zero_where_they_are_fresh() -> None:
    inputs, state = mamba_rows(3, 1, 2), torch.randn(3, 2, 24, 40)
    state[1] = torch.nan
    places, field = placed(state)
    places = replace(places, live=places.source, fresh=torch.tensor([False, True, False]))
    out = mamba.mamba_step(*inputs, places)
    state[1] = 0
    wanted = mamba_reference.mamba_step(*inputs, state)
    found = out, after_of(places, field, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


SHAPE = LinearConfig(frozenset(), 2, 4, 16, 16, 4)


def delta_recurrence(positions: int) -> Recurrence:
    inputs = DeltaInputs(
        mixed=torch.randn(positions, SHAPE.conv_channels),
        decay=-torch.rand(positions, 4, 1),
        beta=torch.rand(positions, 4),
        gate=torch.empty(0),
    )
    return linear_attention._Recurrence(inputs, torch.randn(4, SHAPE.conv_channels), SHAPE)


def mamba_recurrence(positions: int) -> Recurrence:
    channels = SHAPE.conv_channels
    heads = mamba_layers._Heads(
        torch.randn(4, channels), torch.randn(channels), -torch.rand(4), torch.randn(4)
    )
    durations = torch.rand(positions, 4)
    return mamba_layers._Recurrence(torch.randn(positions, channels), durations, heads, SHAPE)


def lightning_recurrence(positions: int) -> Recurrence:
    return lightning_layers._Recurrence(torch.randn(positions, 4, 48), torch.rand(4))


@pytest.mark.parametrize("make", [delta_recurrence, mamba_recurrence, lightning_recurrence])
def test_a_layers_step_in_place_is_that_of_its_twin(make: Callable[[int], Recurrence]) -> None:
    torch.manual_seed(5)
    recurrence, values = make(3), SHAPE.state_values
    if make is lightning_recurrence:
        values = 4 * 16 * 16
    places, field = placed(torch.randn(3, values))
    places = replace(places, fresh=torch.tensor([False, False, True]))
    assert isinstance(recurrence, PlacedRecurrence)
    out = recurrence.step_in_place(slice(0, 3), places)
    wanted, after = recurrence.step(slice(0, 3), places.read())
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    found = after_of(places, field, after)
    torch.testing.assert_close(found, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("positions", "groups", "heads"), [(1, 1, 4), (32, 2, 2), (75, 2, 6)])
def test_mamba_scan(positions: int, groups: int, heads: int) -> None:
    inputs, state = mamba_rows(positions, groups, heads), torch.randn(heads, 24, 40)
    found = mamba.mamba_scan(*inputs, state)
    wanted = mamba_reference.mamba_scan(*inputs, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 16])
def test_a_position_that_forgets_all_costs_the_others_no_digits(channels: int) -> None:
    q, k, v, decay, beta = rows(16, 1, 16, 16, channels)
    decay[3] = -3000.0
    found = delta_rule.delta_scan(q, k, v, decay, beta, torch.zeros(1, 16, 16))
    wanted = linear_reference.delta_scan(q, k, v, decay, beta, torch.zeros(1, 16, 16))
    torch.testing.assert_close(found, wanted, rtol=5e-6, atol=5e-6)


def test_delta_scan_of_equal_keys() -> None:
    # The worst system to solve: every change undoes the one before.
    q, k, v, decay, beta = rows(32, 1, 16, 16)
    k, decay, beta = k[:1].expand(32, 1, 16), torch.zeros_like(decay), torch.ones_like(beta)
    state = torch.zeros(1, 16, 16)
    found = delta_rule.delta_scan(q, k, v, decay, beta, state)
    wanted = linear_reference.delta_scan(q, k, v, decay, beta, state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


SHAPES = {
    1: expert_tiles.FEW_ROWS,
    5: expert_tiles.FEW_ROWS,
    70: expert_tiles.MANY_ROWS,
    170: expert_tiles.MOST_ROWS,
}


@pytest.mark.parametrize(("num_rows", "shape"), SHAPES.items())
def test_grouped_gemm(num_rows: int, shape: expert_tiles.TileShape) -> None:
    torch.manual_seed(num_rows)
    experts, top_k, depth, columns = 5, 2, 40, 72
    x, weights = torch.randn(num_rows, depth), torch.randn(experts, columns, depth)
    # The last expert is never chosen.
    chosen = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(num_rows)])
    tiles = expert_tiles.plan_tiles(chosen, experts)
    assert tiles.shape is shape
    of_choice = tiles.order // top_k
    found = grouped_gemm.grouped_gemm(x, weights, tiles, top_k=top_k)
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


@pytest.mark.parametrize("has_bias", [False, True])
def test_stacked_experts_by_kernels(has_bias: bool) -> None:
    torch.manual_seed(3)
    biases = (torch.randn(4, 48), torch.randn(4, 16)) if has_bias else ()
    stacked = StackedExperts(
        torch.randn(4, 48, 16), torch.randn(4, 16, 24), reference.silu_and_mul, *biases
    )
    h = torch.randn(9, 16)
    shares, chosen = layer_ops.route(torch.randn(9, 4), 2, normalize=True)
    found = stacked.by_kernels(h, shares, chosen).view(9, 2, 16).sum(1)
    torch.testing.assert_close(found, stacked.run(h, shares, chosen), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [expert_tiles.FEW_ROWS, expert_tiles.MANY_ROWS])
@pytest.mark.parametrize(("num_choices", "experts"), [(1, 3), (64, 5), (200, 40), (333, 512)])
def test_choices_are_sorted_into_tiles_by_one_launch(
    num_choices: int, experts: int, shape: expert_tiles.TileShape
) -> None:
    flat = torch.randint(experts, (num_choices,), generator=torch.Generator().manual_seed(4))
    found = expert_tiles.plan_few(flat, experts, shape)
    wanted = expert_tiles.plan_many(flat, experts, shape)
    assert torch.equal(found.order, wanted.order)
    assert torch.equal(found.expert, wanted.expert)
    used = wanted.expert < experts
    assert torch.equal(found.first[used], wanted.first[used])
    assert torch.equal(found.end[used], wanted.end[used])
    assert (found.end <= found.first)[~used].all()
