"""What separating prefill from decode costs on one machine, against one worker that does both.

A checkpoint of random weights is served four ways by `kvmesh up` on the same cores: by one worker
with all of them; by one prefill and one decode worker which share them, where the scheduler places
each request (`auto`); by the same with half of the cores for each worker, whatever the other one
does; and by workers which share the cores, with every prompt handed over. Each way gets the same
Poisson load from `kvmesh bench serve`, in turns.

    python -m benchmarks.one_box
    python -m benchmarks.one_box --rounds 1 --requests 8      # a quick look
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.our_mesh import CHECKPOINT
from benchmarks.random_llama import SERVED_SHAPE, write_checkpoint
from benchmarks.result import RESULTS, ROOT, Row, Target, document, markdown, save
from kvmesh.core.config import child_environment
from kvmesh.core.cores import usable_cores

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 32
RATES = (0.4, 0.8)
TTFT_MS, TPOT_MS = 3000, 200
MIXED, AUTO, APART = "one mixed worker", "P/D 1+1, auto", "P/D 1+1, always handed over"
DIVIDED = "P/D 1+1, auto, half of the cores each"
ALLOWED_LOSS = 0.05
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

NOTES = (
    f"Llama of {SERVED_SHAPE.name} random weights with a vocabulary of {SERVED_SHAPE.vocab:,},"
    f" {PROMPT_TOKENS} random tokens in, {OUTPUT_TOKENS} out, greedy; Poisson arrivals, the same"
    " for all ways; medians of the rounds, of failed the most\n"
    f"- {MIXED}: one decode worker with all cores; the others are two workers, of which one that"
    f" has work alone uses all cores, but in {DIVIDED} only its own\n"
    f"- good: answered with a first token within {TTFT_MS} ms and a mean time per token within"
    f" {TPOT_MS} ms, as a share of all"
).split("\n- ")


@dataclass(frozen=True, slots=True)
class Way:
    """How the machine is used.

    Attributes:
        threads: computing threads of each worker; 0: the workers with work share the cores.
    """

    name: str
    num_prefill: int
    placement: str
    threads: int = 0


WAYS = (
    Way(MIXED, 0, "auto"),
    Way(AUTO, 1, "auto"),
    Way(DIVIDED, 1, "auto", max(usable_cores() // 2, 1)),
    Way(APART, 1, "disaggregated"),
)


def measure(way: Way, model: Path, rate: float, requests: int, seed: int) -> Row:
    """One stack under one load.

    Raises:
        subprocess.CalledProcessError: it did not come up.
    """
    kvmesh = [sys.executable, "-m", "kvmesh.cli"]
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        found = Path(folder, "serve.json")
        load = [*kvmesh, "bench", "serve", "--requests", str(requests), "--rate", str(rate)]
        load += ["--input-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
        load += ["--goodput", f"ttft:{TTFT_MS}", f"tpot:{TPOT_MS}", "--seed", str(seed)]
        load += ["--warmup", "2", "--save", str(found)]
        stack = [*kvmesh, "up", "--model", str(model), "--port", "0", "--decode", "1"]
        stack += ["--prefill", str(way.num_prefill), "--threads", str(way.threads)]
        stack += ["--state-dir", str(Path(folder, "state"))]
        subprocess.run(
            [*stack, "--run", shlex.join(load)],
            check=True,
            cwd=ROOT,
            env=child_environment({"KVMESH_ROUTING__PLACEMENT": way.placement}),
            stdout=subprocess.DEVNULL,
        )
        return row_of(way.name, rate, json.loads(found.read_text()))


def row_of(system: str, rate: float, report: Mapping[str, Any]) -> Row:
    """A row from what `kvmesh bench serve` saved."""
    return {
        "system": system,
        "requests/s": rate,
        "TTFT p50 ms": round(report["p50_ttft_ms"], 1),
        "TTFT p99 ms": round(report["p99_ttft_ms"], 1),
        "TPOT p50 ms": round(report["p50_tpot_ms"], 2),
        "ITL p99 ms": round(report["p99_itl_ms"], 1),
        "good": round(report["request_goodput"] / report["request_throughput"], 3),
        "failed": report["failed"],
    }


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """The scheduler's placement is nowhere worse than one mixed worker by more than a little."""
    found = {(row["system"], row["requests/s"]): row for row in rows}
    targets = []
    for rate in sorted({row["requests/s"] for row in rows}):
        auto, mixed = found[AUTO, rate], found[MIXED, rate]
        for name, at_most in (("TTFT p50 ms", True), ("TPOT p50 ms", True), ("good", False)):
            label = f"{name} at {rate:g}/s: auto over one mixed worker"
            value = None if not mixed[name] else auto[name] / mixed[name]
            goal = 1 + ALLOWED_LOSS if at_most else 1 - ALLOWED_LOSS
            targets.append(Target(label, value, goal, at_most))
    return targets


def median_row(rounds: Sequence[Row]) -> Row:
    """One row for the rounds of a way at a rate."""
    row: Row = dict(rounds[0])
    for name, first in rounds[0].items():
        if name == "failed":
            row[name] = max(each[name] for each in rounds)
        elif not isinstance(first, str):
            row[name] = round(statistics.median(each[name] for each in rounds), 3)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=2, help="how often all ways take their turn")
    parser.add_argument("--requests", type=int, default=20, help="in each load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "one_box.json")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        model = write_checkpoint(SERVED_SHAPE, Path(folder), arguments.seed)
        for name in TOKENIZER:
            shutil.copy(CHECKPOINT / name, model)
        for rate in RATES:
            measured: dict[str, list[Row]] = {way.name: [] for way in WAYS}
            for number in range(arguments.rounds):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    seed = arguments.seed + number
                    row = measure(way, model, rate, arguments.requests, seed)
                    measured[way.name].append(row)
                    sys.stderr.write(f"{row}\n")
            rows += [median_row(found) for found in measured.values()]
    result = document(rows, targets_of(rows), arguments.seed, NOTES)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
