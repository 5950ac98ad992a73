"""First tokens of long prompts whose prefix lies on another worker: fetched against computed.

    python -m benchmarks.prefix_fetch

Real worker processes with a random Llama, one engine thread each: a holder that computes each
prompt, and readers of the same prompt that fetch its prefix from there over one kind of channel,
lease and all. A second time it is cached where it was read, which is the least that it can take.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from benchmarks.fetch_workers import Address, Asker, asking, worker_process
from benchmarks.result import Row, Target, spread
from benchmarks.worker_bench import checkpoint, parser_of, publish

BLOCK = 16
TAIL = 16
"""New tokens behind the prefix."""

PREFIXES = (2048, 4096, 8192)
CHANNELS = ("shm", "tcp")
GOAL = 0.25
"""Of the time that computing takes."""


async def measure(
    holder: Address, readers: Mapping[str, Address], repeats: int, seed: int
) -> list[Row]:
    """A row for each length and channel."""
    draw = random.Random(seed)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        at_holder = await stack.enter_async_context(asking(holder))
        at_readers = {
            channel: await stack.enter_async_context(asking(reader))
            for channel, reader in readers.items()
        }
        await _warm_up(draw, at_holder, at_readers, holder)
        for prefix in PREFIXES:
            computed: list[float] = []
            fetched: dict[str, list[float]] = {channel: [] for channel in at_readers}
            cached: dict[str, list[float]] = {channel: [] for channel in at_readers}
            for _ in range(repeats):
                prompt = make_prompt(draw, prefix)
                first = await at_holder.first_token(prompt)
                computed.append(first.milliseconds)
                for channel, reader in at_readers.items():
                    source = holder.source(prefix // BLOCK)
                    read = await reader.first_token(prompt, source)
                    again = await reader.first_token(prompt)
                    assert read.cached_tokens == again.cached_tokens == prefix, "all was fetched"
                    assert read.token_id == first.token_id, "the same token"
                    fetched[channel].append(read.milliseconds)
                    cached[channel].append(again.milliseconds)
            for channel in at_readers:
                row = {
                    "channel": channel,
                    "prefix": prefix,
                    "computed_ms": spread(computed, 1),
                    "fetched_ms": spread(fetched[channel], 1),
                    "cached_ms": spread(cached[channel], 1),
                }
                row["fetched_of_computed"] = round(ratio(row), 3)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
                rows.append(row)
    return rows


def make_prompt(draw: random.Random, prefix: int) -> list[int]:
    return [draw.randrange(3, 30000) for _ in range(prefix + TAIL)]


async def _warm_up(
    draw: random.Random, holder: Asker, readers: Mapping[str, Asker], address: Address
) -> None:
    """Connections, libraries and caches, by a prompt of each kind."""
    prompt = make_prompt(draw, 512)
    await holder.first_token(prompt)
    for reader in readers.values():
        await reader.first_token(make_prompt(draw, 512))
        await reader.first_token(prompt, address.source(512 // BLOCK))


def ratio(row: Row) -> float:
    """Fetched over computed."""
    return float(row["fetched_ms"]["median"] / row["computed_ms"]["median"])


def targets(rows: Sequence[Row]) -> list[Target]:
    """The worst of all lengths, for each channel."""
    found = []
    for channel in CHANNELS:
        worst = max((ratio(row) for row in rows if row["channel"] == channel), default=None)
        name = f"{channel}: first token behind a fetched prefix, of computed"
        found.append(Target(name, worst, GOAL, at_most=True))
    return found


def main() -> None:
    """Measures and writes bench/results/prefix_fetch.*."""
    options = parser_of(__doc__, "prefix_fetch").parse_args()
    num_blocks = 2 * (max(PREFIXES) // BLOCK) + 100
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = checkpoint(options.shape, Path(folder), options.seed, 2 * max(PREFIXES))
        start = [("holder", "shm,tcp"), *((f"reader-{each}", each) for each in CHANNELS)]
        holder, *readers = [
            stack.enter_context(worker_process(name, model, num_blocks, kinds, options.dtype))
            for name, kinds in start
        ]
        by_channel = dict(zip(CHANNELS, readers, strict=True))
        rows = asyncio.run(measure(holder, by_channel, options.repeats, options.seed))
    about = [
        f"random Llama of {options.shape}, {options.dtype}, one engine thread per worker",
        f"{TAIL} new tokens behind the prefix",
        "computed: on the holder, which has nothing of it",
        "fetched: on a worker that has nothing of it either, from the holder, lease included",
        "cached: there again, which is the least that it can take",
        "times are from the request on a worker's stream to the first token",
    ]
    publish(rows, targets(rows), options, about)


if __name__ == "__main__":
    main()
