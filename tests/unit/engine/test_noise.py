from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvmesh.engine.mixing import mix_64
from kvmesh.engine.noise import gumbel_noise, key_halves, stream_key, uniform_of

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF


def uniform(keys: Sequence[int], vocab_size: int) -> Tensor:
    low, high = torch.tensor([key_halves(key) for key in keys], dtype=torch.int32).T
    return uniform_of(low, high, vocab_size)


def plain_uniform(key: int, token: int) -> float:
    """The definition, in Python integers."""

    def scramble(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
        return x ^ (x >> 16)

    x = scramble((token * 0x9E3779B1 + key) & MASK)
    x = scramble(x ^ (key >> 32)) >> 1
    return min((x + 0.5) / 2**31, 1 - 2**-24)


def test_mix_64_is_splitmix() -> None:
    # First outputs of SplitMix64 from seed 1234567, as published with its reference code.
    step = 0x9E3779B97F4A7C15
    outputs = [mix_64(1234567 + (i + 1) * step) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_tensor_noise_follows_the_definition() -> None:
    keys = [stream_key(seed, position) for seed, position in [(0, 0), (2**64 - 1, 7), (-5, 10**6)]]
    out = uniform(keys, 1000)
    for row, key in zip(out.tolist(), keys, strict=True):
        for token in (0, 1, 2, 499, 999):
            assert math.isclose(row[token], plain_uniform(key, token), rel_tol=1e-6)


def test_rows_do_not_depend_on_the_batch() -> None:
    keys = [stream_key(seed, 3) for seed in range(5)]
    together = gumbel_noise(keys, 50, CPU)
    for row, key in zip(together, keys, strict=True):
        assert torch.equal(row, gumbel_noise([key], 50, CPU)[0])


def test_seed_and_position_both_matter() -> None:
    keys = {stream_key(seed, position) for seed in range(50) for position in range(50)}
    assert len(keys) == 2500
    assert stream_key(1, 2) != stream_key(2, 1)


def test_noise_is_uniform_and_uncorrelated() -> None:
    out = uniform([stream_key(seed, seed) for seed in range(40)], 5000).double()
    counts = torch.histc(out, bins=20, min=0, max=1)
    # Chi-squared over 19 degrees of freedom stays below 43.8 in 999 of 1000 draws.
    expected = out.numel() / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 43.8
    between = torch.corrcoef(out).fill_diagonal_(0).abs().max()
    neighbours = torch.corrcoef(torch.stack([out[:, 1:].flatten(), out[:, :-1].flatten()]))[0, 1]
    assert float(between) < 0.08
    assert abs(float(neighbours)) < 0.01


def test_gumbel_is_finite_and_has_its_mean() -> None:
    out = gumbel_noise([stream_key(9, position) for position in range(200)], 5000, CPU)
    assert out.isfinite().all()
    assert abs(float(out.mean()) - 0.5772) < 0.01
