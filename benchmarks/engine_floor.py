"""What the machine could do: matrix products and reading memory, measured; and what follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.random_llama import Shape
from kvmesh.kernels import huge_memory
from kvmesh.kernels.linear import make_linear


@dataclass(frozen=True)
class Limits:
    """Rates of the machine in one dtype."""

    flops: float
    read_bytes_per_s: float
    value_bytes: int


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs: what the machine can do when nothing disturbs it."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_limits(dtype: str, repeats: int) -> Limits:
    """Times a large product and the sum of a large tensor."""
    kind: torch.dtype = getattr(torch, dtype)
    size = 2048
    x = torch.randn(512, size).to(kind)
    product = make_linear(torch.randn(size, size).to(kind))
    flops = 2 * 512 * size * size / best_seconds(lambda: product(x), repeats)
    memory = torch.ones(64 << 20)
    huge_memory.gather(memory.data_ptr(), memory.numel() * 4)
    read = memory.numel() * 4 / best_seconds(memory.sum, repeats)
    return Limits(flops, read, kind.itemsize)


def floor_tokens_per_s(shape: Shape, limits: Limits, rows: int, batch: int, context: int) -> float:
    """Tokens per second if nothing cost but products and reading weights and KV.

    Args:
        rows: tokens of each sequence that a step computes.
        context: positions before them.
    """
    tokens = rows * batch
    attended = context + (rows + 1) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * attended * tokens
    flops = 2 * shape.layer_weights * tokens + 2 * shape.head_weights * batch + attention
    weights = shape.layer_weights + shape.head_weights
    values = weights + shape.kv_values * context * batch
    seconds = max(flops / limits.flops, values * limits.value_bytes / limits.read_bytes_per_s)
    return tokens / seconds


def streaming_tokens_per_s(shape: Shape, limits: Limits) -> float:
    """Decode at batch 1 if nothing cost but reading the weights."""
    weights = (shape.layer_weights + shape.head_weights) * limits.value_bytes
    return limits.read_bytes_per_s / weights
