"""What a case of the kernel benchmark is, and how large the cases are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

BLOCK_SIZE = 16
Compute = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the cases are; `SMALL` has every case within the interpreter's reach.

    Attributes:
        decode: (sequences, positions of each context).
        prefill: (chunks, cached positions of each, positions of each chunk).
        rows: rows of the steps between the matrix products.
        expert_rows: rows that choose experts: few, many and most for each.
        positions: positions of a prompt for the delta rule.
    """

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    rows: int
    expert_rows: tuple[int, ...]
    positions: int
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    activation: int = 14_336
    vocab: int = 128_256
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)
    latent: tuple[int, int, int] = (128, 512, 64)
    state: tuple[int, int] = (32, 128)
    mamba: tuple[int, int, int] = (128, 128, 64)


LARGE = Sizes(
    decode=((1, 32_768), (32, 8192), (128, 2048)),
    prefill=((1, 0, 4096), (8, 0, 1024), (1, 7168, 1024)),
    rows=4096,
    expert_rows=(32, 512, 4096),
    positions=4096,
)
SMALL = Sizes(
    decode=((2, 80),),
    prefill=((2, 0, 9), (1, 20, 5)),
    rows=3,
    expert_rows=(3, 60, 150),
    positions=20,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=48,
    activation=64,
    vocab=300,
    experts=(4, 2, 32, 24),
    latent=(3, 24, 8),
    state=(2, 16),
    mamba=(4, 16, 24),
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one set of inputs.

    Attributes:
        shape: for the table.
        ours, twin: the same result, up to rounding.
        num_bytes: that have to be read and written at least.
        flops: multiplications and additions, 0 where memory alone counts.
        tensors: inputs of rivals, by name.
        can_be_captured: nothing in it comes from the host.
    """

    name: str
    shape: str
    ours: Compute
    twin: Compute
    num_bytes: int
    flops: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    can_be_captured: bool = True
