"""Operations of a layer between its matrix products: Triton on CUDA, `host.h` on the CPU if it is
built, the torch twins everywhere else.

Tests: tests/unit/kernels/test_host.py, tests/unit/kernels/test_triton_kernels.py.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvmesh.kernels import (
    host,
    lightning_reference,
    linear_reference,
    mamba_reference,
    reference,
)
from kvmesh.kernels.states import StatePlaces


def _triton() -> ModuleType:
    # Triton takes half a second to import and is needed only with a device.
    from kvmesh.kernels import fused  # noqa: PLC0415

    return fused


def _triton_delta() -> ModuleType:
    from kvmesh.kernels import delta_rule  # noqa: PLC0415 - as above

    return delta_rule


def _triton_lightning() -> ModuleType:
    from kvmesh.kernels import lightning  # noqa: PLC0415 - as above

    return lightning


def _triton_mamba() -> ModuleType:
    from kvmesh.kernels import mamba  # noqa: PLC0415 - as above

    return mamba


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`; `x` is changed in place."""
    if x.is_cuda:
        normed: Tensor = _triton().add_rms_norm(x, delta, weight, eps)
        return normed
    if host.has_vectors(x):
        return host.add_rms_norm(x, delta, weight, eps)
    return reference.add_rms_norm(x, delta, weight, eps)


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """See `reference.add_layer_norm`; `x` is changed in place."""
    if x.is_cuda:
        normed: Tensor = _triton().add_layer_norm(x, delta, weight, bias, eps)
        return normed
    return reference.add_layer_norm(x, delta, weight, bias, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    if gate_up.is_cuda:
        product: Tensor = _triton().silu_and_mul(gate_up)
        return product
    if gate_up.shape[-1] % 32 == 0 and host.has_vectors(gate_up):
        return host.silu_and_mul(gate_up)
    return reference.silu_and_mul(gate_up)


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
    """See `reference.rope_and_write`; `qkv` and `kv` are changed in place."""
    arguments = (qkv, qk_norm, eps, cos, signed_sin, kv, layer, slots)
    if qkv.is_cuda:
        _triton().rope_and_write(*arguments)
    elif host.has_rope(qkv):
        host.rope_and_write(*arguments)
    else:
        reference.rope_and_write(*arguments)


def delta_step_in_place(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, places: StatePlaces
) -> Tensor:
    """See `linear_reference.delta_step`; on a device it updates states in place."""
    out: Tensor = _triton_delta().delta_step(q, k, v, decay, beta, places)
    return out


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `linear_reference.delta_scan`."""
    arguments = (q, k, v, decay, beta, state)
    if q.is_cuda:
        scanned: tuple[Tensor, Tensor] = _triton_delta().delta_scan(*arguments)
        return scanned
    return linear_reference.delta_scan(*arguments)


def lightning_step_in_place(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, places: StatePlaces
) -> Tensor:
    """See `lightning_reference.lightning_step`; on a device it updates states in place."""
    out: Tensor = _triton_lightning().lightning_step(q, k, v, slopes, places)
    return out


def lightning_scan(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `lightning_reference.lightning_scan`."""
    if q.is_cuda:
        scanned: tuple[Tensor, Tensor] = _triton_lightning().lightning_scan(q, k, v, slopes, state)
        return scanned
    return lightning_reference.lightning_scan(q, k, v, slopes, state)


def mamba_step_in_place(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, places: StatePlaces
) -> Tensor:
    """See `mamba_reference.mamba_step`; on a device it updates states in place."""
    out: Tensor = _triton_mamba().mamba_step(q, k, v, decay, places)
    return out


def mamba_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See `mamba_reference.mamba_scan`."""
    if q.is_cuda:
        scanned: tuple[Tensor, Tensor] = _triton_mamba().mamba_scan(q, k, v, decay, state)
        return scanned
    return mamba_reference.mamba_scan(q, k, v, decay, state)


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Chooses experts from a softmax over all of them.

    Args:
        logits: [rows, experts].
        normalize: the weights of the chosen experts sum to 1.

    Returns:
        Weights and expert ids, both [rows, top_k]; weights in the dtype of `logits`.
    """
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts
