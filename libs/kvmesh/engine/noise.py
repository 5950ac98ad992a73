"""Random numbers that depend only on seed, position and token id.

Every device, batch and process computes the same integers, so a stream that moves to another worker
continues with the same tokens (docs/adr/0005-sampling-keyed-by-position.md).
Tests: tests/unit/engine/test_noise.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvmesh.engine.mixing import mix_64, split_mix
from kvmesh.kernels.upload import sent

# Odd and close to 2^32 / golden ratio: neighbouring token ids land far apart.
_TOKEN_STEP = 0x9E3779B1
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def stream_key(seed: int, position: int) -> int:
    """Returns the 64-bit key of all noise for one token of one stream."""
    return mix_64(split_mix(seed) + position)


def _signed_32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts integers arithmetically; the mask makes it a logical shift.
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _scramble(x: Tensor) -> Tensor:
    """In-place 32-bit mixing; int32 products wrap on every device.

    Source: "lowbias32", found by C. Wellons' hash-prospector search (public domain).
    """
    x.bitwise_xor_(_shift_right(x, 16)).mul_(_signed_32(0x7FEB352D))
    x.bitwise_xor_(_shift_right(x, 15)).mul_(_signed_32(0x846CA68B))
    return x.bitwise_xor_(_shift_right(x, 16))


def key_halves(key: int) -> tuple[int, int]:
    """Splits a key into two signed 32-bit integers for tensors, low half first."""
    return _signed_32(key), _signed_32(key >> 32)


def uniform_of(low: Tensor, high: Tensor, vocab_size: int) -> Tensor:
    """Returns uniform numbers in (0, 1) for each row and token.

    Args:
        low, high: [rows] int32, see `key_halves`.

    Returns:
        [rows, vocab] fp32.
    """
    x = torch.arange(vocab_size, dtype=torch.int32, device=low.device) * _signed_32(_TOKEN_STEP)
    x = x + low[:, None]
    # Two rounds with one half of the key each: streams with equal low halves still differ.
    x = _scramble(x).bitwise_xor_(high[:, None])
    x = _shift_right(_scramble(x), 1)
    return x.float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_UNIFORM)


def gumbel_of(low: Tensor, high: Tensor, vocab_size: int) -> Tensor:
    """Returns standard Gumbel noise: argmax of logits plus noise is a draw from their softmax.

    Args:
        low, high: [rows] int32, see `key_halves`.

    Returns:
        [rows, vocab] fp32, finite.
    """
    uniform = uniform_of(low, high, vocab_size)
    # -log(1 - u) instead of -log(u): winners have small exponentials, and small u are exact.
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Variant of `gumbel_of` for whole keys."""
    halves = torch.tensor([key_halves(key) for key in keys], dtype=torch.int32, device=device)
    return gumbel_of(halves[:, 0], halves[:, 1], vocab_size)


def draw_rows(logits: Tensor, low: Tensor, high: Tensor, is_random: Tensor) -> Tensor:
    """Returns the highest logit's index of each row, with Gumbel noise in random rows.

    Never waits, and its shapes do not depend on tensor values.

    Args:
        logits: [rows, vocab] fp32.
        low, high: [rows] int32, see `key_halves`.
        is_random: [rows] int32, 0 for plain argmax.

    Returns:
        [rows] int64 token ids.
    """
    if logits.is_cuda:
        # Triton costs half a second to import and is only needed where there is a device.
        from kvmesh.kernels import draw as kernel  # noqa: PLC0415

        drawn: Tensor = kernel.draw(logits, low, high, is_random)
        return drawn
    noisy = logits + gumbel_of(low, high, logits.shape[1])
    return torch.where(is_random[:, None] != 0, noisy, logits).argmax(dim=-1)


def draw(logits: Tensor, keys: Mapping[int, int]) -> Tensor:
    """Returns the highest logit's index of each row, with Gumbel noise in rows that have a key.

    Args:
        logits: [rows, vocab] fp32; changed in place.
        keys: rows to their `stream_key`; the other rows are greedy.

    Returns:
        [rows] int64 token ids.
    """
    if logits.is_cuda:
        table = [[*key_halves(keys.get(row, 0)), int(row in keys)] for row in range(len(logits))]
        low, high, is_random = sent(table, torch.int32, logits.device).T.contiguous()
        return draw_rows(logits, low, high, is_random)
    if keys:
        noise = gumbel_noise(list(keys.values()), logits.shape[1], logits.device)
        if len(keys) == len(logits):
            logits += noise
        else:
            logits[list(keys)] += noise
    return logits.argmax(dim=-1)
