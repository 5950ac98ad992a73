"""Rotary tables. Tests: tests/unit/engine/test_rope.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.engine.config import QueryGrowth, RopeConfig
from kvmesh.kernels.heads import RopeRows


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and signed sines of every position.

    Attributes:
        cos: [positions, 1, head_dim] in the computation dtype; one row if equal for all positions.
        signed_sin: same shape, first half negated, as `reference.apply_rope` expects it.
    """

    cos: Tensor
    signed_sin: Tensor

    def rows(self, positions: Tensor) -> RopeRows:
        """Returns the rotation of these positions, [rows] int64."""
        index = positions if len(self.cos) > 1 else torch.zeros_like(positions)
        return RopeRows(self.cos.index_select(0, index), self.signed_sin.index_select(0, index))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair of a head's elements.

    Returns:
        [head_dim / 2] fp32, descending.

    Source: arXiv 2104.09864 §3.2; "llama3" as published with the Llama 3.1 weights; YaRN, arXiv
        2309.00071 §3.2; LongRoPE, arXiv 2402.13753 §3; "proportional" as published with the Gemma 4
        weights.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    # "dynamic" changes only sequences longer than any that is served.
    if rope.kind in ("default", "dynamic"):
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "proportional":
        frequencies[int(rope.share * head_dim // 2) :] = 0
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.pair_factors) * rope.theta**exponents)
    # Waves shorter than the original context stay, longer ones stretch, those between are mixed.
    keep = _yarn_keep(rope, head_dim) if rope.kind == "yarn" else _llama3_keep(rope, frequencies)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _llama3_keep(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    spread = rope.high_freq_factor - rope.low_freq_factor
    return ((turns - rope.low_freq_factor) / spread).clamp(0, 1)


def _yarn_keep(rope: RopeConfig, head_dim: int) -> Tensor:
    def pair_with(turns: float) -> float:
        """Returns the pair that makes this many turns within the original context."""
        waves = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal ends would divide by zero.
    spread = high - low if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / spread).clamp(0, 1)


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    num_positions: int,
    dtype: torch.dtype,
    device: str,
    rotary_dim: int = 0,
) -> RopeTable:
    """Returns the table for positions below `num_positions`; angles are computed in fp32.

    Args:
        rotary_dim: number of elements of a head that are rotated, 0 for all.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, rotary_dim or head_dim))
    cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
    if rotary_dim:
        resting = (num_positions, (head_dim - rotary_dim) // 2)
        cos = torch.cat([cos, torch.ones(resting)], dim=-1)
        sin = torch.cat([sin, torch.zeros(resting)], dim=-1)
    return RopeTable(
        torch.cat([cos, cos], dim=-1).to(device, dtype)[:, None],
        torch.cat([-sin, sin], dim=-1).to(device, dtype)[:, None],
    )


def resting_table(head_dim: int, dtype: torch.dtype, device: str) -> RopeTable:
    """Returns the table of layers without rotation, which changes no value."""
    still = torch.ones((1, 1, head_dim), dtype=dtype, device=device)
    return RopeTable(still, torch.zeros_like(still))


def query_factors(
    growth: QueryGrowth, num_positions: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Returns the factors of queries at positions below `num_positions`.

    Returns:
        [positions, 1].

    Source: the reference code published with the Llama 4 weights.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    factors = 1 + growth.share * torch.log1p(torch.floor(positions / growth.length))
    return factors.to(device, dtype)[:, None]
