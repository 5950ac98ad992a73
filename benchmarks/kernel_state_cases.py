"""Kernels of linear states, for `kernel_cases`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernel_case import KernelCase, Sizes
from kvmesh.kernels import (
    delta_rule,
    lightning,
    lightning_reference,
    linear_reference,
    mamba,
    mamba_reference,
)
from kvmesh.kernels.states import StatePlaces


def state_case_makers(sizes: Sizes, device: torch.device) -> list[Callable[[], KernelCase]]:
    """See `kernel_cases.case_makers`."""
    return [
        *(partial(_delta_step, sizes, device, per_channel=each) for each in (False, True)),
        *(partial(_delta_scan, sizes, device, per_channel=each) for each in (False, True)),
        partial(_lightning_step, sizes, device),
        partial(_lightning_scan, sizes, device),
        partial(_mamba_step, sizes, device),
        partial(_mamba_scan, sizes, device),
    ]


def _rule(
    sizes: Sizes, count: int, device: torch.device, *, per_channel: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, dim = sizes.state
    q, k = (
        linear_reference.l2_normalize(torch.randn(count, heads, dim, device=device))
        for _ in range(2)
    )
    v, beta = torch.randn(count, heads, dim, device=device), torch.rand(count, heads, device=device)
    return q, k, v, -torch.rand(count, heads, dim if per_channel else 1, device=device), beta


def _placed(state: Tensor) -> tuple[StatePlaces, Tensor]:
    """States in the blocks of a pool, to be written to as many others; and those."""
    count, device = len(state), state.device
    field = torch.cat([state.flatten(1), torch.empty_like(state).flatten(1)])
    ids = torch.arange(2 * count, device=device)
    fresh = torch.zeros(count, dtype=torch.bool, device=device)
    places = StatePlaces(field, ids[:count], ids[count:], fresh)
    return places, field[count:].view(state.shape)


def _rule_name(per_channel: bool) -> str:
    return "KDA" if per_channel else "gated delta rule"


def _delta_step(sizes: Sizes, device: torch.device, *, per_channel: bool) -> KernelCase:
    count, (heads, dim) = min(32, sizes.rows), sizes.state
    inputs = _rule(sizes, count, device, per_channel=per_channel)
    state = torch.randn(count, heads, dim, dim, device=device)
    places, after = _placed(state)
    return KernelCase(
        f"{_rule_name(per_channel)}, step",
        f"batch {count}, {heads} heads of {dim} x {dim}",
        lambda: (delta_rule.delta_step(*inputs, places), after),
        lambda: linear_reference.delta_step(*inputs, state),
        num_bytes=2 * state.nbytes,
    )


def _delta_scan(sizes: Sizes, device: torch.device, *, per_channel: bool) -> KernelCase:
    heads, dim = sizes.state
    inputs = _rule(sizes, sizes.positions, device, per_channel=per_channel)
    state = torch.zeros(heads, dim, dim, device=device)
    return KernelCase(
        f"{_rule_name(per_channel)}, prefill",
        f"{sizes.positions} positions, {heads} heads of {dim} x {dim}",
        lambda: delta_rule.delta_scan(*inputs, state),
        lambda: linear_reference.delta_scan(*inputs, state),
        num_bytes=4 * inputs[0].nbytes,
        flops=8 * sizes.positions * heads * dim * dim,
    )


def _lightning_step(sizes: Sizes, device: torch.device) -> KernelCase:
    count, (heads, dim) = min(32, sizes.rows), sizes.state
    q, k, v, _, _ = _rule(sizes, count, device)
    slopes = torch.rand(heads, device=device)
    state = torch.randn(count, heads, dim, dim, device=device)
    places, after = _placed(state)
    return KernelCase(
        "lightning attention, step",
        f"batch {count}, {heads} heads of {dim} x {dim}",
        lambda: (lightning.lightning_step(q, k, v, slopes, places), after),
        lambda: lightning_reference.lightning_step(q, k, v, slopes, state),
        num_bytes=2 * state.nbytes,
    )


def _lightning_scan(sizes: Sizes, device: torch.device) -> KernelCase:
    heads, dim = sizes.state
    q, k, v, _, _ = _rule(sizes, sizes.positions, device)
    slopes = torch.rand(heads, device=device)
    state = torch.zeros(heads, dim, dim, device=device)
    return KernelCase(
        "lightning attention, prefill",
        f"{sizes.positions} positions, {heads} heads of {dim} x {dim}",
        lambda: lightning.lightning_scan(q, k, v, slopes, state),
        lambda: lightning_reference.lightning_scan(q, k, v, slopes, state),
        num_bytes=4 * q.nbytes,
        flops=4 * sizes.positions * heads * dim * dim,
    )


def _mamba_inputs(
    sizes: Sizes, count: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, key_dim, value_dim = sizes.mamba
    q, k = (torch.randn(count, 1, key_dim, device=device) * key_dim**-0.5 for _ in range(2))
    v = torch.randn(count, heads, value_dim, device=device)
    return q, k, v, -torch.rand(count, heads, device=device)


def _mamba_step(sizes: Sizes, device: torch.device) -> KernelCase:
    count, (heads, key_dim, value_dim) = min(32, sizes.rows), sizes.mamba
    inputs = _mamba_inputs(sizes, count, device)
    state = torch.randn(count, heads, key_dim, value_dim, device=device)
    places, after = _placed(state)
    return KernelCase(
        "Mamba-2, step",
        f"batch {count}, {heads} heads of {key_dim} x {value_dim}",
        lambda: (mamba.mamba_step(*inputs, places), after),
        lambda: mamba_reference.mamba_step(*inputs, state),
        num_bytes=2 * state.nbytes,
    )


def _mamba_scan(sizes: Sizes, device: torch.device) -> KernelCase:
    heads, key_dim, value_dim = sizes.mamba
    inputs = _mamba_inputs(sizes, sizes.positions, device)
    state = torch.zeros(heads, key_dim, value_dim, device=device)
    return KernelCase(
        "Mamba-2, prefill",
        f"{sizes.positions} positions, {heads} heads of {key_dim} x {value_dim}",
        lambda: mamba.mamba_scan(*inputs, state),
        lambda: mamba_reference.mamba_scan(*inputs, state),
        num_bytes=2 * inputs[0].nbytes + 2 * inputs[2].nbytes,
        flops=4 * sizes.positions * heads * key_dim * value_dim,
    )
