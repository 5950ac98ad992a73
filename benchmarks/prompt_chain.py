"""First tokens of prompts that one worker computes, or two together, a layer behind each other.

    python -m benchmarks.prompt_chain

Real worker processes with random models, one engine thread each: a Llama, and a hybrid whose layers
are convolutions but for every fourth. What one worker computes alone and what it computes together
with the other one come in turns, so a machine that becomes slower slows both. A prompt is cut where
routes cut it. Each in files of its own: real services with more prompts than they can compute
(`chain_load.py`), and in virtual time eight workers by load (`policies_chains.py`), and what had
better travel between two (`chain_ways.py`).
Tests: tests/unit/benchmarks/test_prompt_chain.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from benchmarks import chain_load
from benchmarks.chain_ways import compared
from benchmarks.fetch_workers import Address, asking, worker_process
from benchmarks.policies_chains import LOADS, PROMPT_TOKENS, label, prompt_chains
from benchmarks.policies_experiments import Rows
from benchmarks.random_checkpoints import random_model, write_checkpoint
from benchmarks.result import Row, Target, document, save, spread
from benchmarks.worker_bench import checkpoint, parser_of, publish
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.kv_plan import plan_kv
from kvmesh.engine.pair_share import pair_share
from kvmesh.policy.chain import Cost, best_cuts
from kvmesh.policy.prefix_source import FetchPace

BLOCK = 16
LENGTHS = (2048, 8192)
LLAMA, HYBRID = "llama", "lfm2"
MODELS = (LLAMA, HYBRID)
SATURATED, SIMULATED, WAYS = "saturated", "simulated", "ways"
PARTS = (*MODELS, SATURATED, SIMULATED, WAYS)
HYBRID_LAYERS = 12
LONG_GOAL = 1.75
"""Times sooner than alone, of the longest prompt."""

SHORT_GOAL = 0.95
"""Of the shortest one: no slower, but for what runs differ."""


async def measure(
    name: str, workers: Sequence[Address], cost: Cost, block: int, options: argparse.Namespace
) -> list[Row]:
    """A row for each length of one model's prompts."""
    draw = random.Random(options.seed)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(asking(workers[-1]))
        await asker.first_token(_prompt(draw, 512))
        await asker.first_token(_prompt(draw, 512), workers[0].part(512 // 2 // block))
        for length in options.lengths:
            cuts, _ = best_cuts(cost, cost.head(0, length), length, len(workers), block)
            middle = round(options.cut_at * length / block) * block if options.cut_at else cuts[1]
            alone: list[float] = []
            together: list[float] = []
            for _ in range(options.repeats):
                prompt = _prompt(draw, length)
                alone.append((await asker.first_token(prompt)).milliseconds)
                # Another one, of the same length: the first is cached now.
                part = workers[0].part(middle // block) if middle < length else None
                found = await asker.first_token(_prompt(draw, length), part)
                together.append(found.milliseconds)
            row: Row = {
                "model": name,
                "tokens": length,
                "cut_at": middle if middle < length else "alone",
                "alone_ms": spread(alone, 1),
                "together_ms": spread(together, 1),
            }
            row["times_sooner"] = round(times_sooner(row), 3)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
            rows.append(row)
    return rows


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, 15000) for _ in range(length)]


def times_sooner(row: Row) -> float:
    """Alone over together."""
    return float(row["alone_ms"]["median"] / row["together_ms"]["median"])


def targets(rows: Sequence[Row], models: Sequence[str] = MODELS) -> list[Target]:
    """Of the longest prompt and the shortest, for each model."""
    found: list[Target] = []
    long, short = max(LENGTHS), min(LENGTHS)
    for name in models:
        sooner = {row["tokens"]: times_sooner(row) for row in rows if row["model"] == name}
        found += [
            Target(f"{name}, {long} tokens: times sooner on two", sooner.get(long), LONG_GOAL),
            Target(
                f"{name}, {short} tokens: times sooner as routed", sooner.get(short), SHORT_GOAL
            ),
        ]
    return found


def written(name: str, folder: Path, options: argparse.Namespace) -> Path:
    """A random checkpoint of a model."""
    max_tokens = 2 * max(options.lengths)
    if name == LLAMA:
        return checkpoint(options.shape, folder, options.seed, max_tokens)
    kinds = ["full_attention" if layer % 4 == 3 else "conv" for layer in range(HYBRID_LAYERS)]
    model = random_model(
        HYBRID,
        options.seed,
        num_hidden_layers=HYBRID_LAYERS,
        layer_types=kinds,
        max_position_embeddings=max_tokens,
    )
    return write_checkpoint(model, folder)


def rows_of(name: str, options: argparse.Namespace) -> list[Row]:
    """Starts two workers with a model, and measures them."""
    pace = FetchPace()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = written(name, folder, options)
        config = load_model_config(model)
        plan = plan_kv(config, options.dtype, BLOCK)
        size = plan.block_size
        share, overhead = pace.inside_share, pace.overhead_tokens
        cost = Cost(pair_share(config), share, overhead, plan.block_layers)
        # Four prompts, since states of two and the answers want room besides.
        num_blocks = 4 * (max(options.lengths) // size) * len(plan.groups.windows) + 200
        workers = [
            stack.enter_context(
                worker_process(each, model, num_blocks, options.channels, options.dtype)
            )
            for each in ("first", "last")
        ]
        return asyncio.run(measure(name, workers, cost, size, options))


def simulated(size: float, seed: int) -> tuple[list[Row], list[Target]]:
    """The same on eight workers of a profile, in virtual time.

    Args:
        size: factor on the number of requests.
    """
    experiment = prompt_chains(size, seed)
    found: Rows = {job.label: job.run().row for job in experiment.jobs}
    rows: list[Row] = []
    for load in LOADS:
        one, several = (found[label(load, chains=chains)] for chains in (False, True))
        row: Row = {
            "tokens": PROMPT_TOKENS,
            "load": load,
            "alone_ms": round(1e3 * one["TTFT p50"]),
            "together_ms": round(1e3 * several["TTFT p50"]),
            "times_sooner": round(one["TTFT p50"] / several["TTFT p50"], 3),
            "goodput": round(several["goodput/s"] / one["goodput/s"], 4),
        }
        sys.stdout.write(f"{row}\n")
        rows.append(row)
    return rows, list(experiment.judge(found).targets)


def publish_live(models: Sequence[str], options: argparse.Namespace) -> None:
    """Measures real workers."""
    rows = [row for name in models for row in rows_of(name, options)]
    about = [
        f"llama: random, of {options.shape}; lfm2: random, {HYBRID_LAYERS} layers, hidden size 768",
        f"{options.dtype}, one engine thread for each worker; KV goes over {options.channels}",
        "alone: on the last worker; together: the first one computes what is before the cut",
        "times are from the request on the last worker's stream to the first token",
        "every prompt is new",
    ]
    publish(rows, targets(rows, models), options, about)


def publish_apart(
    part: str, found: tuple[list[Row], list[Target]], options: argparse.Namespace, about: list[str]
) -> None:
    """Writes a part beside the rest."""
    path = options.save.with_stem(f"{options.save.stem}_{part}")
    save(document(*found, options.seed, about), path)
    sys.stdout.write(f"{path}\n")


def main() -> None:
    """Measures and writes bench/results/prompt_chain*."""
    parser = parser_of(__doc__, "prompt_chain")
    parser.add_argument("--channels", default="shm")
    parser.add_argument("--cut-at", type=float, default=0.0, help="share of the prompt; 0: by cost")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of live prompts")
    parser.add_argument("--rounds", type=int, default=3, help="of saturated services")
    parser.add_argument("--size", type=float, default=1.0, help="factor on simulated requests")
    options = parser.parse_args()
    if models := [name for name in MODELS if name in options.parts]:
        publish_live(models, options)
    if SATURATED in options.parts:
        about = [
            "two prefill workers and one that decodes, one engine thread each; llama, bfloat16",
            f"{chain_load.NUM_CLIENTS} clients, each sends its next prompt when it has its answer",
            "parts: prompts of which two workers computed a part each",
        ]
        rows = asyncio.run(chain_load.rounds(options.rounds, options.seed, chain_load.NUM_PROMPTS))
        publish_apart(SATURATED, (rows, chain_load.targets(rows)), options, about)
    if SIMULATED in options.parts:
        about = [
            "medians, on eight prefill workers of `tokenlake`; means of two seeds",
            "load: share of what they can do",
            "goodput: share of that with one worker for each prompt",
        ]
        publish_apart(SIMULATED, simulated(options.size, options.seed), options, about)
    if WAYS in options.parts:
        about = [
            "two workers; seconds to the first token and to the second one, which needs all KV",
            "what gains less than 30 % is left to one worker; links to the decode worker are alike",
            "queries: round trips as measured, one answer under way; KV follows them",
            "at least: questions cost nothing but their bytes, each way apart",
        ]
        publish_apart(WAYS, compared(), options, about)


if __name__ == "__main__":
    main()
