"""A prompt of 32k tokens on the CPU, from nothing to its first token: time, and memory at its most.

    python -m benchmarks.long_prompt [--model 110M] [--dtype bfloat16] [--tokens 32768]
        [--chunk 512] [--threads N] [--save bench/results/long_prompt.json]

Steps are planned as in a worker, in chunks of one step's budget. Memory beside weights and KV is
what attention and the layers take while they compute: it must not grow with the square of the
prompt. Tests: tests/unit/benchmarks/test_long_prompt.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.engine_floor import floor_tokens_per_s, measure_limits
from benchmarks.engine_peers import BLOCK_SIZE, prompt
from benchmarks.random_llama import SHAPES, Shape, write_checkpoint
from benchmarks.result import RESULTS, Row, Target, document, save
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Sequence
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits

PARTS = 8
GENERATED = 4
MOST_BESIDE_MIB = 512
"""Scores of all positions over all others, of one layer of the 110M model, would be 48 GiB."""


def main() -> None:
    """Measures and writes the result."""
    options = _parse()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.model]
    with tempfile.TemporaryDirectory() as scratch:
        folder = _checkpoint(shape, Path(scratch), options.tokens, options.seed)
        num_blocks = -(-(options.tokens + GENERATED) // BLOCK_SIZE) + 1
        runner = TorchRunner.load(
            folder,
            served_name=shape.name,
            dtype=options.dtype,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_threads=options.threads,
        )
        loaded_mib = status_mib("VmRSS")
        forget_peak()
        rows: list[Row] = []
        for row in prefill_in_parts(runner, options.tokens, options.chunk):
            rows.append(row)
            sys.stdout.write(f"{row['tokens']} tokens: {row['seconds']} s\n")
            sys.stdout.flush()
        peak_mib = status_mib("VmHWM")
        kv_mib = num_blocks * runner.spec.layout.block_bytes / 2**20
        runner.close()
    limits = measure_limits(options.dtype, 3)
    floor = floor_tokens_per_s(shape, limits, options.tokens, 1, 0)
    beside_mib = peak_mib - loaded_mib - kv_mib
    speed = options.tokens / rows[-1]["seconds"]
    how = f"{shape.name}, {options.dtype}, {options.threads} threads, chunks of {options.chunk}"
    pace = f"{speed:.0f} tokens/s from the first to the last, {speed / floor:.2f} of the floor"
    held = f"{loaded_mib:.0f} MiB when the model was loaded, KV {kv_mib:.0f} MiB"
    notes = [f"{how}: {pace}", f"memory: {held}, {peak_mib:.0f} MiB at most"]
    targets = [Target("MiB at most beside model and KV", beside_mib, MOST_BESIDE_MIB, at_most=True)]
    save(document(rows, targets, options.seed, notes), options.save)
    sys.stdout.write(f"{options.save}\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="110M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / "long_prompt.json")
    return parser.parse_args()


def _checkpoint(shape: Shape, scratch: Path, num_tokens: int, seed: int) -> Path:
    """A model that takes so long a prompt, made in a process whose memory is not counted."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as process:
        folder = process.submit(write_checkpoint, shape, scratch / shape.name, seed).result()
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["max_position_embeddings"] = num_tokens + GENERATED
    file.write_text(json.dumps(config))
    return folder


def prefill_in_parts(runner: ModelRunner, num_tokens: int, chunk: int) -> Iterator[Row]:
    """Computes a prompt and a few tokens after it.

    Yields:
        `PARTS` times, as parts of equal length are done: tokens, and seconds since the start.
    """
    core = EngineCore(runner.spec, runner.kv.num_blocks, BatchLimits(max_tokens=chunk))
    sampling = SamplingParams(temperature=0.0, max_tokens=GENERATED, ignore_eos=True)
    ids = tuple(prompt(num_tokens, runner.spec.vocab_size))
    sequence = core.admit_decode(SequenceSpec(ids, num_tokens, sampling, root_hash("bench")))
    assert isinstance(sequence, Sequence), sequence
    core.run(sequence)
    told = 0
    started = time.perf_counter()
    while core.has_work:
        chunks = core.plan_step()
        core.finish_step(chunks, runner.execute(chunks))
        done = min(sequence.num_computed, num_tokens) * PARTS // num_tokens
        if done > told:
            told = done
            seconds = round(time.perf_counter() - started, 2)
            yield {"tokens": min(sequence.num_computed, num_tokens), "seconds": seconds}
    assert core.is_idle, "the sequence gave everything back"


def forget_peak() -> None:
    """The kernel takes what this process has now as its peak."""
    Path("/proc/self/clear_refs").write_text("5")


def status_mib(name: str) -> float:
    """A line of this process's status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
