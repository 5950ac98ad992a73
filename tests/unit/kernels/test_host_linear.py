"""Linear attention by the compiled library equals the twins, however rows are cut into calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.kernels import host_linear
from kvmesh.kernels.host_linear import LinearShape
from kvmesh.kernels.lightning_reference import lightning_step
from kvmesh.kernels.linear_reference import causal_conv, delta_step, l2_normalize
from tests.native import needs_host_library

pytestmark = needs_host_library
# Strips of 64 columns, of 16, and both.
SHAPES = [LinearShape(2, 4, 16, 64), LinearShape(3, 3, 32, 16), LinearShape(1, 2, 16, 80)]
KERNEL = 4


def delta_by_twins(
    mixed: Tensor, taps: Tensor, decay: Tensor, beta: Tensor, states: Tensor, shape: LinearShape
) -> tuple[Tensor, Tensor]:
    """One row of each sequence."""
    size = shape.heads * shape.key_dim * shape.value_dim
    matrix = states[:, :size].view(-1, shape.heads, shape.key_dim, shape.value_dim)
    before = states[:, size:].view(len(states), KERNEL - 1, mixed.shape[1])
    convolved, before = causal_conv(mixed.float().unsqueeze(1), before, taps)
    active, keys = functional.silu(convolved.squeeze(1)), shape.key_heads * shape.key_dim
    q, k = (
        l2_normalize(x.view(-1, shape.key_heads, shape.key_dim)).repeat_interleave(
            shape.heads // shape.key_heads, dim=1
        )
        for x in (active[:, :keys], active[:, keys : 2 * keys])
    )
    v = active[:, 2 * keys :].view(-1, shape.heads, shape.value_dim)
    out, matrix = delta_step(q * shape.key_dim**-0.5, k, v, decay, beta, matrix)
    return out, torch.cat([matrix.flatten(1), before.flatten(1)], dim=1)


def delta_inputs(
    shape: LinearShape, rows: int, sequences: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    channels = 2 * shape.key_heads * shape.key_dim + shape.heads * shape.value_dim
    values = shape.heads * shape.key_dim * shape.value_dim + (KERNEL - 1) * channels
    # The projections give more columns than these, so rows lie apart.
    mixed = torch.randn(rows, channels + 16).to(dtype)[:, :channels]
    decay = -3 * torch.rand(rows, shape.heads, width)
    beta = torch.rand(rows, shape.heads)
    return mixed, torch.randn(KERNEL, channels), decay, beta, torch.randn(sequences, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_delta_step_equals_the_twins(
    shape: LinearShape, per_channel: bool, dtype: torch.dtype
) -> None:
    inputs = delta_inputs(shape, 3, 3, shape.key_dim if per_channel else 1, dtype)
    assert host_linear.has_linear(inputs[0], shape)
    expected, after = delta_by_twins(*inputs, shape)
    out = host_linear.delta_rule(*inputs, shape)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inputs[-1], after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delta_rows_of_a_prompt_equal_steps_however_they_are_cut(
    shape: LinearShape, per_channel: bool
) -> None:
    mixed, taps, decay, beta, states = delta_inputs(
        shape, 20, 1, shape.key_dim if per_channel else 1, torch.float32
    )
    expected, after = [], states.clone()
    for row in range(20):
        span = slice(row, row + 1)
        out, after = delta_by_twins(mixed[span], taps, decay[span], beta[span], after, shape)
        expected.append(out)
    whole = states.clone()
    at_once = host_linear.delta_rule(mixed, taps, decay, beta, whole, shape)
    torch.testing.assert_close(at_once, torch.cat(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole, after, rtol=1e-4, atol=1e-4)
    cut = states.clone()
    parts = [
        host_linear.delta_rule(mixed[span], taps, decay[span], beta[span], cut, shape)
        for span in (slice(0, 1), slice(1, 3), slice(3, 20))
    ]
    assert torch.equal(torch.cat(parts), at_once)
    assert torch.equal(cut, whole)


def test_a_state_that_is_forgotten_at_once_stays_finite() -> None:
    mixed, taps, decay, beta, states = delta_inputs(SHAPES[0], 20, 1, 16, torch.float32)
    out = host_linear.delta_rule(mixed, taps, 200 * decay, beta, states, SHAPES[0])
    assert out.isfinite().all()
    assert states.isfinite().all()


@pytest.mark.parametrize("sequences", [1, 4])
def test_lightning_equals_the_twins(sequences: int) -> None:
    torch.manual_seed(3)
    shape, positions = LinearShape(3, 3, 16, 16), 5
    heads = torch.randn(sequences * positions, 3, 48)
    slopes, states = torch.tensor([2.0, 0.5, 1e-6]), torch.randn(sequences, 3 * 16 * 16)
    after, expected = states.view(sequences, 3, 16, 16), []
    for position in range(positions):
        q, k, v = heads.view(sequences, positions, 3, 48)[:, position].chunk(3, dim=-1)
        out, after = lightning_step(q, k, v, slopes, after)
        expected.append(out)
    found = host_linear.lightning(heads, slopes, states, shape)
    stacked = torch.stack(expected, dim=1).flatten(0, 1)
    torch.testing.assert_close(found, stacked, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, after.flatten(1), rtol=1e-4, atol=1e-4)


def test_other_shapes_and_devices_are_left_to_the_twins() -> None:
    x = torch.zeros(1, 48)
    assert host_linear.has_linear(x, LinearShape(1, 1, 16, 16))
    assert not host_linear.has_linear(x, LinearShape(1, 1, 16, 24))
    assert not host_linear.has_linear(x, LinearShape(1, 1, 512, 16))
    assert not host_linear.has_linear(x.half(), LinearShape(1, 1, 16, 16))
