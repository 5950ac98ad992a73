"""First tokens of prompts that one worker computes, or two together, a layer behind each other.

    python -m benchmarks.prompt_chain

Real worker processes with a random Llama, one engine thread each. What one worker computes alone
and what it computes together with the other one come in turns, so a machine that becomes slower
slows both. A prompt is cut where routes cut it. Tests: tests/unit/benchmarks/test_prompt_chain.py.
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

from benchmarks.fetch_workers import Address, asking, worker_process
from benchmarks.prefix_fetch import checkpoint
from benchmarks.random_llama import SHAPES
from benchmarks.result import RESULTS, Row, Target, document, markdown, save, spread
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.pair_share import pair_share
from kvmesh.policy.chain import Cost, best_cuts
from kvmesh.policy.prefix_source import FetchPace

BLOCK = 16
LENGTHS = (2048, 8192)
LONG_GOAL = 1.75
"""Times sooner than alone, of the longest prompt."""

SHORT_GOAL = 0.95
"""Of the shortest one: no slower, but for what runs differ."""


async def measure(
    workers: Sequence[Address], cost: Cost, repeats: int, seed: int, cut_at: float
) -> list[Row]:
    """A row for each length."""
    draw = random.Random(seed)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(asking(workers[-1]))
        await asker.first_token(_prompt(draw, 512))
        await asker.first_token(_prompt(draw, 512), workers[0].part(512 // 2 // BLOCK))
        for length in LENGTHS:
            cuts = best_cuts(cost, 0, length, len(workers), BLOCK)
            middle = round(cut_at * length / BLOCK) * BLOCK if cut_at else cuts[1]
            alone: list[float] = []
            together: list[float] = []
            for _ in range(repeats):
                prompt = _prompt(draw, length)
                alone.append((await asker.first_token(prompt)).milliseconds)
                # Another one, of the same length: the first is cached now.
                part = workers[0].part(middle // BLOCK) if middle < length else None
                found = await asker.first_token(_prompt(draw, length), part)
                together.append(found.milliseconds)
            row: Row = {
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
    return [draw.randrange(3, 30000) for _ in range(length)]


def times_sooner(row: Row) -> float:
    """Alone over together."""
    return float(row["alone_ms"]["median"] / row["together_ms"]["median"])


def targets(rows: Sequence[Row]) -> list[Target]:
    """Of the longest prompt and the shortest."""
    by_length = {row["tokens"]: times_sooner(row) for row in rows}
    long, short = max(LENGTHS), min(LENGTHS)
    return [
        Target(f"{long} tokens: times sooner with two workers", by_length.get(long), LONG_GOAL),
        Target(f"{short} tokens: times sooner as routed", by_length.get(short), SHORT_GOAL),
    ]


def main() -> None:
    """Measures and writes bench/results/prompt_chain.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", default="110M", choices=tuple(SHAPES))
    parser.add_argument("--channels", default="shm")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut-at", type=float, default=0.0, help="share of the prompt; 0: by cost")
    parser.add_argument("--save", type=Path, default=RESULTS / "prompt_chain.json")
    options = parser.parse_args()
    num_blocks = 2 * (max(LENGTHS) // BLOCK) + 100
    pace = FetchPace()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = checkpoint(options.shape, Path(folder), options.seed, 2 * max(LENGTHS))
        config = load_model_config(model)
        cost = Cost(
            pair_share(config), pace.share(inside=True), pace.overhead_tokens, config.num_layers
        )
        workers = [
            stack.enter_context(
                worker_process(name, model, num_blocks, options.channels, options.dtype)
            )
            for name in ("first", "last")
        ]
        rows = asyncio.run(measure(workers, cost, options.repeats, options.seed, options.cut_at))
    about = [
        f"random Llama of {options.shape}, {options.dtype}, one engine thread for each worker",
        f"KV goes over {options.channels}",
        "alone: on the last worker; together: the first one computes what is before the cut",
        "times are from the request on the last worker's stream to the first token",
        "every prompt is new",
    ]
    result = document(rows, targets(rows), options.seed, about)
    save(result, options.save)
    sys.stdout.write(markdown(result))


if __name__ == "__main__":
    main()
