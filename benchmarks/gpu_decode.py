"""Decode on a CUDA device with graphs and without, beside the floor; prints each cell.

Tests: tests/unit/benchmarks/test_gpu_bench.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_device import device_rows
from benchmarks.random_llama import SHAPES, Shape, write_checkpoint
from benchmarks.result import RESULTS, Row, document, save

_LARGE = Shape("8 layers of 8B", 4096, 8, 32, 8, 14_336, head_dim=128, vocab=128_256)
"""A layer costs what one of an 8B Llama does; all 32 take minutes to write."""
_SHAPES = {_LARGE.name: _LARGE} | dict(reversed(SHAPES.items()))


def main() -> None:
    """Measures and writes the result."""
    options = _parse()
    if not torch.cuda.is_available():
        sys.exit("gpu_decode needs a CUDA device; `make bench-engine` measures the CPU")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            folder = write_checkpoint(_SHAPES[name], Path(scratch) / name, options.seed)
            found = device_rows(_SHAPES[name], folder, "bfloat16", options, "cuda")
            rows += [as_row(each) for each in found]
            save(document(rows, [], options.seed, _NOTES), options.save)


_NOTES = ["tokens/s; floor: weights and KV at the copy's rate, products at a large product's"]


def as_row(found: dict[str, Any]) -> Row:
    """A row of `device_rows`, flat."""
    cell = found["tokens_per_s"]
    return {
        "model": found["model"],
        "cell": found["cell"],
        **{engine: round(value) for engine, value in cell.items()},
        "floor by": found["floor_by"],
        "share of floor": round(cell["kvmesh"] / cell["floor"], 3),
        "graphs gain": round(cell["kvmesh"] / cell["kvmesh without graphs"], 2),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=_SHAPES, default=list(_SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / "gpu_decode.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
