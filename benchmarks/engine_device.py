"""Decode on a CUDA device, with captured steps and without, beside the floor of its memory."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_floor import (
    Limits,
    best_seconds,
    floor_bound,
    floor_tokens_per_s,
)
from benchmarks.engine_peers import BLOCK_SIZE, Ours, Run
from benchmarks.random_llama import Shape

_COPY_BYTES = 1 << 30
_MATMUL = 8192


def device_rows(
    shape: Shape, folder: Path, dtype: str, options: argparse.Namespace, device: str
) -> list[dict[str, Any]]:
    """Cells of one model in one dtype, one per batch size.

    A step ends when its tokens are read, so what is timed includes the wait for the device.
    """
    blocks = -(-(options.context + 1) // BLOCK_SIZE)
    num_blocks = max(options.batch) * blocks
    ours = Ours(folder, shape, dtype, num_blocks, options.threads, device)
    limits = _limits(getattr(torch, dtype), options.repeats, device)
    rows = []
    for batch in options.batch:
        run = ours.decode(batch, options.context)
        ours.runner.use_static_steps(0)
        cell = {"kvmesh without graphs": batch / _median(run, options.repeats)}
        ours.runner.use_static_steps(max(options.batch))
        cell["kvmesh"] = batch / _median(run, options.repeats)
        cell["floor"] = floor_tokens_per_s(shape, limits, 1, batch, options.context)
        name = f"{device} decode {batch}"
        numbers = ", ".join(f"{engine} {value:.0f}" for engine, value in cell.items())
        sys.stdout.write(f"{shape.name} {dtype} {name}: {numbers} tokens/s\n")
        sys.stdout.flush()
        bound = floor_bound(shape, limits, 1, batch, options.context)
        row = {"model": shape.name, "dtype": dtype, "cell": name, "tokens_per_s": cell}
        rows.append(row | {"floor_by": bound})
    ours.runner.close()
    return rows


def _median(run: Run, repeats: int) -> float:
    times = []
    for turn in range(repeats + 3):  # the first ones compile
        started = time.perf_counter()
        run()
        if turn >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _limits(dtype: torch.dtype, repeats: int, device: str) -> Limits:
    """A copy's rate, half of which reads, and a large product's."""
    memory = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(memory)
    square = torch.ones(_MATMUL, _MATMUL, dtype=dtype, device=device)

    def copy() -> None:
        other.copy_(memory)
        _wait(device)

    def multiply() -> None:
        _ = square @ square
        _wait(device)

    return Limits(
        flops=2 * _MATMUL**3 / best_seconds(multiply, repeats),
        read_bytes_per_s=2 * _COPY_BYTES / best_seconds(copy, repeats),
        value_bytes=dtype.itemsize,
    )


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
