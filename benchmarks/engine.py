"""Speed of the engine on the CPU, beside transformers, a bare torch loop, other engines, the floor.

    python -m benchmarks.engine [--models 110M 0.5B] [--dtypes bfloat16 float32] [--threads N]
        [--peers openvino=PYTHON ...] [--save bench/results/engine.json]

Engines take turns in every cell, so that a busy machine is as unkind to each.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_device import device_rows
from benchmarks.engine_floor import (
    WAYS,
    floor_tokens_per_s,
    measure_limits,
    readers,
    weight_bytes,
)
from benchmarks.engine_peers import (
    BLOCK_SIZE,
    Child,
    Engine,
    HandLoop,
    Ours,
    Run,
    Transformers,
    prompt,
)
from benchmarks.engine_report import SHARE_OF_READING, WEIGHTS_READ, markdown, targets
from benchmarks.engines import ENGINES
from benchmarks.older_cpu import use_avx2
from benchmarks.peer_versions import own_versions, peer_versions
from benchmarks.random_llama import SHAPES, Shape, write_checkpoint
from benchmarks.result import ROOT
from kvmesh.cli.bench_report import command_line, git_commit, machine, versions, write_result
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.batch import build_batch
from kvmesh.engine.core import EngineCore
from kvmesh.engine.memory import available_bytes
from kvmesh.engine.protocol import SampledToken, StepResult
from kvmesh.engine.sampler import sample
from kvmesh.engine.sequence import Sequence as RunningSequence
from kvmesh.kv.hashing import root_hash

# Turns of a cell end after this many seconds, but not before there are two.
_CELL_SECONDS = 10.0
# From here on what only a first run costs is little beside the run, and it counts as a turn.
_LONG_S = 2.0
# Runs of one turn when they are shorter than this: steps follow one another where requests are
# served, and one after another engine's finds none of its own code and KV in the caches.
_RUNS_OF_A_TURN = 3
_SHORT_S = 0.1
# What a peer may need while it converts and loads the weights, and what is to be left.
_COPIES = 3
_SPARE_BYTES = 6 << 30
# Sequences of the step whose overhead is measured, whatever the cells.
_OVERHEAD_BATCH = 8


def main() -> None:
    """Measures and writes the result."""
    options = _parse()
    if options.avx2:
        use_avx2("benchmarks.engine", sys.argv[1:])
    torch.set_num_threads(options.threads)
    pythons = {name: Path(python) for name, python in options.peers}
    peers = own_versions("transformers") | peer_versions(
        pythons, {name: (kind.package,) for name, kind in ENGINES.items()}
    )
    rows: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            folder = write_checkpoint(SHAPES[name], Path(scratch) / name, options.seed)
            for dtype in options.dtypes:
                with ExitStack() as stack:
                    cells, more = _measure(SHAPES[name], folder, dtype, options, stack)
                rows += cells
                extra |= more
                if torch.cuda.is_available() and options.batch:
                    rows += device_rows(SHAPES[name], folder, dtype, options, "cuda")
    result = {
        "benchmark": "engine",
        "command": command_line(["python", "-m", "benchmarks.engine"], sys.argv[1:]),
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "machine": machine() | {"threads": options.threads, "only_avx2": options.avx2},
        "versions": versions() | peers,
        "seed": options.seed,
        "context": options.context,
        "rows": rows,
        "limits": extra,
        "targets": targets(rows, extra, only_avx2=options.avx2),
    }
    write_result(result, markdown(result), options.save)
    sys.stdout.write(f"{options.save}\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=12, help="turns of each engine in a cell")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--avx2", action="store_true", help="all engines as on a CPU without AVX-512 and bf16"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        type=_peer,
        default=[],
        metavar="NAME=PYTHON",
        help=f"other engines and the Pythons that have them: {', '.join(ENGINES)}",
    )
    parser.add_argument("--save", type=Path, default=Path("bench/results/engine.json"))
    return parser.parse_args()


def _peer(text: str) -> tuple[str, str]:
    name, separator, python = text.partition("=")
    if name not in ENGINES or not separator:
        known = ", ".join(ENGINES)
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with a name of {known}")
    return name, python


def _measure(
    shape: Shape, folder: Path, dtype: str, options: argparse.Namespace, stack: ExitStack
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All cells of one model in one dtype, and the limits that they are held against."""
    limits = measure_limits(dtype, options.repeats)  # before a peer loads beside it
    longest = max([options.context + 1, *options.prefill])
    most = max([_OVERHEAD_BATCH, *options.batch])
    num_blocks = most * -(-(options.context + 1) // BLOCK_SIZE) + -(-longest // BLOCK_SIZE)
    ours = Ours(folder, shape, dtype, num_blocks, options.threads)
    label = f"{shape.name} {dtype}"
    weights = weight_bytes(shape, limits)
    engines: dict[str, Engine] = {
        "kvmesh": ours,
        "transformers": Transformers(folder, shape, dtype),
        "hand loop": HandLoop(folder, shape, dtype),
    }
    engines |= _start_peers(folder, dtype, weights, label, options, stack)
    found: dict[str, dict[str, float]] = {}
    shares: dict[str, float] = {}

    def tell(name: str) -> None:
        numbers = ", ".join(f"{engine} {value:.0f}" for engine, value in found[name].items())
        sys.stdout.write(f"{label} {name}: {numbers} tokens/s\n")
        sys.stdout.flush()

    for tokens in options.prefill:
        runs = {name: engine.prefill(tokens) for name, engine in engines.items()}
        turns = _take_turns(runs, options.repeats)
        cell = {name: tokens / statistics.median(times) for name, times in turns.items()}
        cell["floor"] = floor_tokens_per_s(shape, limits, tokens, 1, 0)
        found[f"prefill {tokens}"] = cell
        tell(f"prefill {tokens}")
    for batch in options.batch:
        runs = {name: engine.decode(batch, options.context) for name, engine in engines.items()}
        if batch == 1:
            # In turn with the engines, next to ours: what memory delivers on a shared machine
            # changes by half within seconds.
            runs = {"kvmesh": runs["kvmesh"]} | readers(weights) | runs
        turns = _take_turns(runs, options.repeats)
        cell = {name: batch / statistics.median(times) for name, times in turns.items()}
        if batch == 1:
            shares[f"decode {batch}"] = share_of_reading(turns)
            cell[WEIGHTS_READ] = max(cell.pop(way) for way in WAYS)
        cell["floor"] = floor_tokens_per_s(shape, limits, 1, batch, options.context)
        found[f"decode {batch}"] = cell
        tell(f"decode {batch}")
    rows = [
        {"model": shape.name, "dtype": dtype, "cell": name, "tokens_per_s": cell}
        | ({SHARE_OF_READING: shares[name]} if name in shares else {})
        for name, cell in found.items()
    ]
    more: dict[str, Any] = {
        label: {
            "matmul_flops": limits.flops,
            "read_bytes_per_s": limits.read_bytes_per_s,
            "step_overhead_share": _overhead_share(ours, options.context, options.repeats),
        }
    }
    return rows, more


def _start_peers(
    folder: Path,
    dtype: str,
    weights: int,
    label: str,
    options: argparse.Namespace,
    stack: ExitStack,
) -> dict[str, Engine]:
    """The other engines that compute in this dtype, as many as there is memory for."""
    most_steps = _RUNS_OF_A_TURN * (options.repeats + 1)  # where the first turn does not count
    peers: dict[str, Engine] = {}
    for name, python in options.peers:
        if dtype not in ENGINES[name].dtypes:
            continue
        if available_bytes() < _COPIES * weights + _SPARE_BYTES:
            sys.stdout.write(
                f"{label}: {name} is left out, there is not the memory for it as well\n"
            )
            continue
        peers[name] = stack.enter_context(
            Child(name, python, folder, dtype, options.threads, most_steps)
        )
    return peers


def share_of_reading(turns: Mapping[str, Sequence[float]]) -> float:
    """How much of a step's time the weights take to be read, turn by turn, in the fastest way.

    Two medians over all turns may be of moments in which memory was not equally fast.
    """
    return min(
        statistics.median(
            read / ours for read, ours in zip(turns[way], turns["kvmesh"], strict=True)
        )
        for way in WAYS
    )


def _take_turns(runs: Mapping[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, turn by turn."""
    times = {name: [_seconds(run)] for name, run in runs.items()}
    if min(first for (first,) in times.values()) < _LONG_S:
        times = {name: [] for name in runs}
    begun = time.perf_counter()
    num_firsts = max(map(len, times.values()))
    for turn in range(num_firsts, repeats):
        if turn >= 2 and time.perf_counter() - begun > _CELL_SECONDS:
            break
        for name, run in runs.items():
            times[name].append(_seconds(run))
    return times


def _seconds(run: Run) -> float:
    """One turn: the median of its runs."""
    times: list[float] = []
    while not times or (len(times) < _RUNS_OF_A_TURN and times[0] < _SHORT_S):
        started = time.perf_counter()
        own = run()
        times.append(own if isinstance(own, float) else time.perf_counter() - started)
    return statistics.median(times)


def _overhead_share(ours: Ours, context: int, repeats: int) -> float:
    """Part of a step at batch 8 that is planning it, making the batch, choosing tokens and
    telling who waits for them.
    """
    core = _running_core(ours, _OVERHEAD_BATCH, context)
    result = StepResult([SampledToken(1)] * _OVERHEAD_BATCH)
    chunks = ours.decode_chunks(_OVERHEAD_BATCH, context)
    logits = torch.randn(_OVERHEAD_BATCH, ours.runner.spec.vocab_size)
    turns = _take_turns(
        {
            "step": lambda: ours.runner.execute(chunks),
            "batch": lambda: build_batch(chunks, BLOCK_SIZE),
            "sample": lambda: sample(logits, chunks),
            "loop": lambda: core.finish_step(core.plan_step(), result),
        },
        repeats,
    )
    times = {name: statistics.median(values) for name, values in turns.items()}
    return (times["batch"] + times["sample"] + times["loop"]) / times["step"]


def _running_core(ours: Ours, batch: int, context: int) -> EngineCore:
    """Bookkeeping of a batch that decodes; what it plans is not computed."""
    spec = ours.runner.spec
    core = EngineCore(spec, batch * -(-2 * context // BLOCK_SIZE))
    sampling = SamplingParams(temperature=0.0, max_tokens=context, ignore_eos=True)
    for sequence in range(batch):
        tokens = tuple(prompt(context, spec.vocab_size, sequence))
        admitted = core.admit_decode(SequenceSpec(tokens, context, sampling, root_hash("bench")))
        assert isinstance(admitted, RunningSequence)
        core.start_decode(admitted, first_token=1)
    return core


if __name__ == "__main__":
    main()
