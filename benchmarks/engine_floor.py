"""What the machine could do: matrix products and reading memory, measured; and what follows."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.random_llama import Shape
from kvmesh.kernels import huge_memory
from kvmesh.kernels.linear import make_linear
from scripts.build_native import find_compiler

_SOURCE = Path(__file__).with_name("stream.cpp")
# GCC notes that vectors of 64 bytes are passed otherwise with AVX-512: nothing else calls this.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17", "-Wno-psabi")
# Ways to read that differ in streams per thread and in what is asked for ahead.
WAYS = ("one stream", "one stream, ahead", "four streams", "four streams, ahead")
# Many times any cache, as weights are.
_STREAMED_BYTES = 512 << 20


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
    """Times a large product, and reading of large memory in the fastest of several ways."""
    kind: torch.dtype = getattr(torch, dtype)
    size = 2048
    x = torch.randn(512, size).to(kind)
    product = make_linear(torch.randn(size, size).to(kind))
    flops = 2 * 512 * size * size / best_seconds(lambda: product(x), repeats)
    ways = readers(_STREAMED_BYTES).values()
    read = _STREAMED_BYTES / min(best_seconds(way, repeats) for way in ways)
    return Limits(flops, read, kind.itemsize)


@functools.cache
def load_stream() -> Callable[[int, int, int, int], int]:
    """The reader, compiled now: address, bytes, way and threads to the exclusive or of all it read.

    Raises:
        FileNotFoundError: there is no compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/stream.so"
        command = [find_compiler() or "c++", *_FLAGS, str(_SOURCE), "-o", made]
        subprocess.run(command, check=True)
        function = ctypes.CDLL(made).stream
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int64
    reader: Callable[[int, int, int, int], int] = function
    return reader


def readers(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Reads every byte of memory in huge pieces, as packed weights lie, by all threads; by way."""
    stream, threads = load_stream(), torch.get_num_threads()
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    huge_memory.gather(memory.data_ptr(), memory.nbytes)

    def read(way: int) -> Callable[[], object]:
        return lambda: stream(memory.data_ptr(), memory.nbytes, way, threads)

    return {name: read(way) for way, name in enumerate(WAYS)}


def floor_tokens_per_s(shape: Shape, limits: Limits, rows: int, batch: int, context: int) -> float:
    """Tokens per second if nothing cost but products and reading weights and KV.

    Args:
        rows: tokens of each sequence that a step computes.
        context: positions before them.
    """
    return rows * batch / max(_floor_seconds(shape, limits, rows, batch, context))


def floor_bound(shape: Shape, limits: Limits, rows: int, batch: int, context: int) -> str:
    """Which of the two is the floor."""
    products, reading = _floor_seconds(shape, limits, rows, batch, context)
    return "products" if products > reading else "reading"


def _floor_seconds(
    shape: Shape, limits: Limits, rows: int, batch: int, context: int
) -> tuple[float, float]:
    """Of products, and of reading."""
    tokens = rows * batch
    attended = context + (rows + 1) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * attended * tokens
    flops = 2 * shape.layer_weights * tokens + 2 * shape.head_weights * batch + attention
    weights = shape.layer_weights + shape.head_weights
    values = weights + shape.kv_values * context * batch
    return flops / limits.flops, values * limits.value_bytes / limits.read_bytes_per_s


def weight_bytes(shape: Shape, limits: Limits) -> int:
    """What a step at batch 1 has to read, its KV aside."""
    return (shape.layer_weights + shape.head_weights) * limits.value_bytes
