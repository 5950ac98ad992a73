"""Tiers below a worker's pool: first tokens, speeds, and what is found again of a trace.

    python -m benchmarks.tiers --trace agentic_coding_sessions.jsonl.gz

Real worker processes with a random Llama, one after the other, whose pool holds two prompts and a
half: one with host memory below, one with a disk. Two prompts are computed and pushed out by
others. One is asked for again; a third time it is still in the pool, which is the least that it can
take. The other one is named to the worker some time before it is asked for, as a gateway does.
Tests: tests/unit/benchmarks/test_tiers.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.fetch_workers import (
    Address,
    Asker,
    FirstToken,
    asking,
    prefetching,
    worker_process,
)
from benchmarks.prefix_fetch import BLOCK, PREFIXES, TAIL, make_prompt
from benchmarks.random_llama import SHAPES
from benchmarks.result import Row, Target, spread
from benchmarks.tier_copies import Blocks, copy_rows, drop_pages
from benchmarks.tier_hits import hit_rate
from benchmarks.tier_split import Split, splits
from benchmarks.worker_bench import checkpoint, parser_of, publish
from kvmesh.core.cores import usable_cores
from kvmesh.sim.trace import read_trace

PREFIX = 4096
GOALS_MS = {"host": 60, "disk": 150}
GOAL_OF_BEST = 0.8
GOAL_OF_INFINITE = 0.9
POOL_BLOCKS = 256
"""Of the trace's 512 tokens each: the longest of its prompts."""

POOL_PROMPTS = 2.5
"""That the worker's pool holds: room for what comes up ahead beside as much again."""

AHEAD_S = 0.3
"""From when a prompt is routed until its worker takes it, where it has to wait for a slot."""

WAYS = ("computed", "loaded", "prefetched", "cached")

SIZES = (0, 1, 2, 5, 10)
"""Of a tier, in pools."""

NUM_WORKERS = (1, 4)


async def measure(
    worker: Address, folder: Path, prefix: int, repeats: int, seed: int
) -> dict[str, list[FirstToken]]:
    """First tokens of one worker, by way.

    Args:
        folder: of its files on disk.
    """
    draw = random.Random(seed)
    tokens: dict[str, list[FirstToken]] = {name: [] for name in WAYS}
    async with asking(worker) as asker, prefetching(worker) as prefetcher:
        await asker.first_token(make_prompt(draw, 512))
        for _ in range(repeats):
            prompts = [make_prompt(draw, prefix) for _ in range(2)]
            first = [await asker.first_token(each) for each in prompts]
            await push_out(asker, draw, prefix)
            drop_file_pages(folder)
            again = await asker.first_token(prompts[0])
            last = await asker.first_token(prompts[0])
            drop_file_pages(folder)
            prefetcher.prefetch(prompts[1], prefix // BLOCK, BLOCK)
            await asyncio.sleep(AHEAD_S)
            ahead = await asker.first_token(prompts[1])
            assert again.cached_tokens == ahead.cached_tokens == prefix, "all was brought up"
            assert first[0].token_id == again.token_id == last.token_id, "the same token"
            assert first[1].token_id == ahead.token_id, "the same token"
            for name, found in zip(WAYS, (first[0], again, ahead, last), strict=True):
                tokens[name].append(found)
    return tokens


def first_row(
    tier: str, prefix: int, tokens: Mapping[str, Sequence[FirstToken]], by_id: Mapping[str, Split]
) -> Row:
    """Milliseconds to first tokens, and on what they are spent behind a prefix that was loaded."""
    row: Row = {"what": "first token", "tier": tier, "prefix": prefix}
    row |= {
        f"{name}_ms": spread([each.milliseconds for each in found], 1)
        for name, found in tokens.items()
    }
    parts = [(each.milliseconds, by_id[each.request_id]) for each in tokens["loaded"]]
    row["loading_ms"] = spread([split.loading_ms for _, split in parts], 1)
    row["computing_ms"] = spread([split.computing_ms for _, split in parts], 1)
    row["rest_ms"] = spread(
        [total - split.loading_ms - split.computing_ms for total, split in parts], 1
    )
    return row


async def push_out(asker: Asker, draw: random.Random, prefix: int) -> None:
    """Prompts that leave no room for those before; half a prompt goes when one comes up."""
    for _ in range(2):
        await asker.first_token(make_prompt(draw, prefix))


def drop_file_pages(folder: Path) -> None:
    """Nothing of the tiers' files in a folder stays in the page cache."""
    for path in folder.glob("*.kv"):
        drop_pages(path)


def first_tokens(options: argparse.Namespace) -> list[Row]:
    """A row for each tier."""
    rows: list[Row] = []
    for tier in GOALS_MS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            spans = folder / "spans.jsonl"
            model = checkpoint(options.shape, folder, options.seed, 2 * max(PREFIXES))
            flags: dict[str, object] = {f"tiers.{tier}-gib": 1}
            flags["engine.num-threads"] = options.threads
            flags |= {"telemetry.trace.exporter": "jsonl", "telemetry.trace.target": spans}
            if tier == "disk":
                flags["tiers.disk-path"] = folder / "tier"
            num_blocks = int(options.prefix // BLOCK * POOL_PROMPTS)
            prompts = options.prefix, options.repeats, options.seed
            started = worker_process(tier, model, num_blocks, "shm,tcp", options.dtype, flags)
            with started as worker:
                tokens = asyncio.run(measure(worker, folder / "tier", *prompts))
            by_id = splits(spans.read_text())
            rows.append(_told(first_row(tier, options.prefix, tokens, by_id)))
    return rows


def speeds(options: argparse.Namespace) -> list[Row]:
    """What the tiers themselves do, for the KV of the same prompt."""
    block_bytes = BLOCK * SHAPES[options.shape].kv_values * 2
    blocks = Blocks(options.prefix // BLOCK, block_bytes, 8 * options.repeats + 1, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        rows = copy_rows(blocks, Path(folder))
    return [_told({"what": "speed", **row}) for row in rows]


def hits(path: Path) -> list[Row]:
    """What is found again of a trace, by the size of the tier."""
    requests = read_trace(path)
    everything = len(requests) * POOL_BLOCKS
    rows: list[Row] = []
    for num_workers in NUM_WORKERS:
        infinite = hit_rate(requests, num_workers, everything, 0)
        for size in SIZES:
            found = hit_rate(requests, num_workers, POOL_BLOCKS, size * POOL_BLOCKS)
            row: Row = {"what": "hits", "workers": num_workers, "tier_of_pool": size}
            row |= {"hit_rate": round(found, 4), "of_infinite": round(found / infinite, 4)}
            rows.append(_told(row))
    return rows


def _told(row: Row) -> Row:
    sys.stdout.write(f"{row}\n")
    sys.stdout.flush()
    return row


def targets(rows: Sequence[Row]) -> list[Target]:
    """The median of each tier, and the hits of one worker below ten pools of host memory."""
    first = {str(row["tier"]): row for row in rows if row["what"] == "first token"}
    speed = {str(row["tier"]): row for row in rows if row["what"] == "speed"}
    found = [
        Target(
            f"{tier}: milliseconds to a first token behind {PREFIX:,} evicted tokens",
            float(first[tier]["loaded_ms"]["median"]) if tier in first else None,
            goal,
            at_most=True,
        )
        for tier, goal in GOALS_MS.items()
    ]
    found += [
        Target(
            f"{tier}: loading, of {against}",
            speed.get(tier, {}).get("of_best"),
            GOAL_OF_BEST,
        )
        for tier, against in (("host", "memcpy"), ("disk", "fio's sequential read"))
    ]
    least = [
        float(row["of_infinite"])
        for row in rows
        if row["what"] == "hits" and row["tier_of_pool"] == SIZES[-1]
    ]
    name = f"hits with host memory of {SIZES[-1]} pools, of an infinite cache"
    return [*found, Target(name, min(least, default=None), GOAL_OF_INFINITE)]


def main() -> None:
    """Measures and writes bench/results/tiers.*."""
    parser = parser_of(__doc__, "tiers", repeats=3)
    parser.add_argument("--prefix", type=int, default=PREFIX)
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="of the engine; default: all cores"
    )
    parser.add_argument("--trace", type=Path, help="of sessions; without one hits are not counted")
    options = parser.parse_args()
    rows = [*speeds(options), *first_tokens(options)]
    if options.trace is not None:
        rows += hits(options.trace)
    about = [
        f"random Llama of {options.shape}, {options.dtype}; engine threads: {options.threads}",
        f"the pool holds {POOL_PROMPTS} prompts",
        "computed: the worker computes the prompt, and evicts it for others, with no pause",
        "loaded: asked for again, its prefix comes up from the tier",
        f"prefetched: likewise, named to the worker {AHEAD_S * 1000:.0f} ms before it is asked for",
        "cached: there again, which is the least that it can take",
        "loading, computing and rest are the parts of loaded, the first two by the worker's spans",
        "loading: until the prefix is in the pool",
        f"computing: from there to the first token, a step of {TAIL} tokens behind the prefix",
        "rest: the request's way to the worker, its other work, and the token's way back",
        "disk: nothing of its file is in the page cache",
        "speed: of the KV of one prompt",
        "hits: cached prompt tokens of all; bookkeeping of pool and tier, nothing is computed",
        f"hits: sessions stay with their worker, whose pool has {POOL_BLOCKS} blocks of 512 tokens",
    ]
    publish(rows, targets(rows), options, about)


if __name__ == "__main__":
    main()
