"""Speed of every model family on the CPU, beside transformers with its static cache.

    python -m benchmarks.families [--families LABEL ...] [--dtypes bfloat16 float32]
        [--seconds S] [--save bench/results/families.json]

Times are those of the process on the CPU, by one thread, and both engines take turns in every
cell: a busy machine is as unkind to each. Transformers computes its experts in every way that it
has for the CPU and counts by the fastest. In fp32 both are to choose the same token after a prompt.
Tests: tests/unit/benchmarks/test_families.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine_peers import BLOCK_SIZE, Run, next_tokens, prompt, static_cache
from benchmarks.peer_versions import own_versions
from benchmarks.random_checkpoints import convert, random_model, write_checkpoint
from benchmarks.random_families import FAMILIES, VOCAB, WITHOUT_STATIC_CACHE
from benchmarks.result import RESULTS, Row, Target, document, save
from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import SequenceChunk, StateChunk
from kvmesh.engine.runner import TorchRunner

GOAL = 1.15
_CELLS = {"prefill": (512,), "decode": (1, 8)}
_CONTEXT = 512
_FEWEST_TURNS = 3


class Ours:
    """The engine's own runner, whatever the model keeps."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._runner = TorchRunner.load(
            folder, served_name=folder.name, dtype=dtype, num_blocks=2048, block_size=BLOCK_SIZE
        )
        self._groups = self._runner.spec.groups
        self._free = iter(range(2048))

    def _chunk(self, sequence: int, start: int, end: int) -> SequenceChunk:
        count = -(-end // self._runner.spec.layout.block_size)
        tables = [self._take(count) for _ in self._groups.windows]
        state = None
        if self._groups.state_blocks:
            live = self._take(self._groups.state_blocks)
            state = StateChunk(live, live if start else [])
        return SequenceChunk(
            sequence_id=sequence,
            token_ids=prompt(end, VOCAB, sequence),
            start=start,
            end=end,
            block_table=tables[0],
            num_prompt_tokens=end,
            sampling=SamplingParams(temperature=0.0),
            sample=True,
            more_tables=tables[1:],
            state=state,
        )

    def _take(self, count: int) -> list[int]:
        return [next(self._free) for _ in range(count)]

    def prefill(self, num_tokens: int) -> Run:
        """One prompt of this length, from nothing to its first token."""
        self._free = iter(range(2048))
        return self._of([self._chunk(0, 0, num_tokens)])

    def decode(self, batch: int) -> Run:
        """One step of a batch. What the blocks hold is zeros: they cost as much."""
        self._free = iter(range(2048))
        return self._of([self._chunk(each, _CONTEXT, _CONTEXT + 1) for each in range(batch)])

    def _of(self, chunks: list[SequenceChunk]) -> Run:
        def run() -> list[int]:
            return [each.token_id for each in self._runner.execute(chunks).tokens if each]

        return run

    def close(self) -> None:
        """Frees the memory."""
        self._runner.close()


class Transformers:
    """transformers with its static cache, and torch's attention where the family can take it.

    Args:
        growing: the family takes no static cache, only one of its own that grows.
    """

    def __init__(self, model: Any, dtype: str, *, growing: bool) -> None:
        self._model = convert(model, getattr(torch, dtype))
        self._growing = growing

    def ways(self, kind: str) -> Iterator[str]:
        """Sets one way to compute experts after the other; names them."""
        can: Any = self._model._can_set_experts_implementation
        # The batched way copies an expert for each row that chose it: gigabytes for a prompt.
        ways = (
            ("eager", "grouped_mm", "batched_mm") if kind == "decode" else ("eager", "grouped_mm")
        )
        for way in ways if can() else ("",):
            self.use(way)
            yield way

    def use(self, way: str) -> None:
        """Sets a way that `ways` named."""
        if way:
            self._model.set_experts_implementation(way)

    def prefill(self, num_tokens: int) -> Run:
        """See `Ours.prefill`."""
        cache = None if self._growing else static_cache(self._model, num_tokens)
        ids = torch.tensor([prompt(num_tokens, VOCAB)])

        @torch.inference_mode()
        def run() -> list[int]:
            if cache is not None:
                cache.reset()
            return [int(token) for token in next_tokens(self._model, ids, 0, cache)]

        return run

    def decode(self, batch: int) -> Run:
        """See `Ours.decode`."""
        ids = torch.tensor([prompt(1, VOCAB, sequence) for sequence in range(batch)])
        if self._growing:
            return self._decode_growing(ids)
        cache = static_cache(self._model, _CONTEXT + 1)

        @torch.inference_mode()
        def run() -> list[int]:
            # Caches count what they hold; the count is set back to the same context.
            for layer in cache.layers:
                if isinstance(count := getattr(layer, "cumulative_length", None), Tensor):
                    count.fill_(min(_CONTEXT, layer.max_cache_len - 1))
                if hasattr(layer, "cumulative_length_int"):
                    layer.cumulative_length_int = _CONTEXT
            return [int(token) for token in next_tokens(self._model, ids, _CONTEXT, cache)]

        with torch.inference_mode():
            # States of linear layers are there only after something was computed.
            next_tokens(self._model, ids, 0, cache)
        return run

    def _decode_growing(self, ids: Tensor) -> Run:
        """A step over what a prompt left; the position that it adds is taken away again."""
        with torch.inference_mode():
            cache = self._model(ids.expand(-1, _CONTEXT), use_cache=True).past_key_values

        @torch.inference_mode()
        def run() -> list[int]:
            for layer in cache.layers:
                if layer.is_initialized:
                    layer.keys = layer.keys[:, :, :_CONTEXT]
                    layer.values = layer.values[:, :, :_CONTEXT]
            return [int(token) for token in next_tokens(self._model, ids, _CONTEXT, cache)]

        return run


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    dtypes = ["bfloat16", "float32"]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / "families.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for label in options.families:
        with tempfile.TemporaryDirectory() as scratch:
            model = random_model(label, options.seed)
            folder = write_checkpoint(model, Path(scratch))
            for dtype in options.dtypes:
                rows += _measure(label, model, folder, dtype, options.seconds)
    peers = own_versions("transformers")
    save(document(rows, targets(rows), options.seed, _NOTES, peers), options.save)
    sys.stdout.write(f"{options.save}\n")


_NOTES = (
    "tokens per second of CPU time, one thread, medians; decode with context 512",
    "transformers: static cache (minimax: its own), sdpa where it can, experts in the fastest way",
)


def _measure(label: str, model: Any, folder: Path, dtype: str, seconds: float) -> list[Row]:
    ours = Ours(folder, dtype)
    theirs = Transformers(model, dtype, growing=label in WITHOUT_STATIC_CACHE)
    rows = []
    for kind, sizes in _CELLS.items():
        for size in sizes:
            runs = {"kvmesh": getattr(ours, kind)(size), "": getattr(theirs, kind)(size)}
            way = _fastest(theirs, runs[""], kind)
            same = None
            if dtype == "float32" and kind == "prefill":
                same = runs["kvmesh"]() == runs[""]()
            times = _take_turns(runs, seconds)
            row: Row = {
                "family": label,
                "dtype": dtype,
                "cell": f"{kind} {size}",
                "kvmesh": round(size / times["kvmesh"], 1),
                "transformers": round(size / times[""], 1),
                "ratio": round(times[""] / times["kvmesh"], 2),
                "experts": way or None,
                "same token": same,
            }
            rows.append(row)
            sys.stdout.write(
                f"{label} {dtype} {row['cell']}: {row['kvmesh']:.0f} and {row['transformers']:.0f}"
                f" tokens/s, {row['ratio']:.2f}x{f' of {way}' if way else ''}\n"
            )
            sys.stdout.flush()
    ours.close()
    return rows


def _fastest(theirs: Transformers, run: Run, kind: str) -> str:
    """Sets the way in which transformers computes its experts soonest; says which."""
    times = {}
    for way in theirs.ways(kind):
        run()
        times[way] = _cpu_seconds(run)
    best = min(times, key=lambda way: times[way])
    theirs.use(best)
    run()
    return best


def _cpu_seconds(run: Run) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _take_turns(runs: Mapping[str, Run], seconds: float) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    runs["kvmesh"]()
    begun = time.process_time()
    while len(times[""]) < _FEWEST_TURNS or time.process_time() - begun < seconds:
        for name, run in runs.items():
            times[name].append(_cpu_seconds(run))
    return {name: statistics.median(values) for name, values in times.items()}


def targets(rows: list[Row]) -> list[Target]:
    """One for each family, its slowest cell beside transformers; and one for what is chosen."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["family"], []).append(row["ratio"])
    fast = [
        Target(f"{label}: times transformers, every cell", min(values), GOAL)
        for label, values in ratios.items()
    ]
    told = [row["same token"] for row in rows if row["same token"] is not None]
    if not told:
        return fast
    return [*fast, Target("fp32: other tokens after a prompt", told.count(False), 0, at_most=True)]


if __name__ == "__main__":
    main()
