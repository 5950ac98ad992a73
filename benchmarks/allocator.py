"""Replays a trace through the block pool and through a plain free list: how far requests scatter.

    python -m benchmarks.allocator TRACE.jsonl.gz [TRACE.jsonl.gz ...]

Two pools are replayed, a prefill worker's (blocks held while the prompt is computed and sent) and a
decode worker's (held until the last token, growing block by block). For every request the runs of
its blocks on each side and the calls of its transfer, aligned over both sides, are counted.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS, Row, Target, document, markdown, save
from kvmesh.core.errors import OutOfBlocksError
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.runs import consecutive_runs
from kvmesh.transfer.alignment import align_runs

BLOCK_SIZE = 16
HASHED_TOKENS = 512
PREFILL_S_PER_TOKEN = 1e-4
DECODE_S_PER_TOKEN = 0.03


class FreeList:
    """What most engines do: blocks in the order in which they were freed."""

    def __init__(self) -> None:
        self._blocks: deque[int] = deque()

    @property
    def num_blocks(self) -> int:
        """Blocks that are free."""
        return len(self._blocks)

    def add(self, blocks: Iterable[int]) -> None:
        """Puts blocks at the end."""
        self._blocks.extend(blocks)

    def take(self, n: int, after: int | None = None) -> list[int]:
        """Takes the first ones, wherever they lie."""
        return [self._blocks.popleft() for _ in range(n)]


class FreeListPool(BlockPool):
    """The block pool with a free list below it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        free: Any = FreeList()
        free.add(range(num_blocks))
        self._empty = free

    def _make_contiguous(self, n: int) -> None:
        """A free list has no runs to look for."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    at_s: float
    num_prompt: int
    num_output: int
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class Counts:
    """What a replay found."""

    segments: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    fresh_calls: list[int] = field(default_factory=list)
    refused: int = 0
    cached: int = 0
    wanted: int = 0
    allocator_s: float = 0.0
    allocations: int = 0


def read_trace(path: Path) -> Iterator[Request]:
    """Requests by arrival; ids stand for 512 tokens, so each gives 32 block hashes."""
    per_id = HASHED_TOKENS // BLOCK_SIZE
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    for record in sorted(records, key=lambda record: record["t_ms"]):
        full = record["input_len"] // BLOCK_SIZE
        hashes = [
            BlockHash(number.to_bytes(8, "little") + index.to_bytes(8, "little"))
            for number in record["hash_ids"]
            for index in range(per_id)
        ]
        yield Request(
            record["t_ms"] / 1e3, record["input_len"], record["output_len"], tuple(hashes[:full])
        )


class Worker:
    """One pool over time: who holds what, and when it grows or goes."""

    def __init__(self, pool: BlockPool, counts: Counts) -> None:
        self.pool = pool
        self._counts = counts
        self._events: list[tuple[float, int, list[int], int]] = []
        self._next = 0

    def admit(self, request: Request) -> tuple[list[int], int] | None:
        """Blocks of the prompt and how many were cached; None when there is no room."""
        cached = self.pool.match(request.hashes)
        self.pool.acquire(cached)
        num_blocks = -(-request.num_prompt // BLOCK_SIZE)
        try:
            fresh = self._allocate(num_blocks - len(cached), cached[-1] if cached else None)
        except OutOfBlocksError:
            self.pool.release(cached)
            return None
        blocks = cached + fresh
        for block, block_hash in zip(blocks, request.hashes, strict=False):
            self.pool.seal(block, block_hash)
        return blocks, len(cached)

    def hold(self, blocks: list[int], at_s: float, growth: int, step_s: float) -> None:
        """Keeps blocks from `at_s`, adding `growth` blocks one per step; then lets them go."""
        heapq.heappush(self._events, (at_s + step_s, self._next, blocks, growth))
        self._next += 1
        self._step_s = step_s

    def advance(self, now: float) -> None:
        """Lets time pass."""
        while self._events and self._events[0][0] <= now:
            at_s, number, blocks, growth = heapq.heappop(self._events)
            if growth <= 0:
                self._counts.segments.append(len(consecutive_runs(blocks)))
                self.pool.release(blocks)
                continue
            try:
                blocks += self._allocate(1, blocks[-1])
            except OutOfBlocksError:
                growth = 1
            heapq.heappush(self._events, (at_s + self._step_s, number, blocks, growth - 1))

    def _allocate(self, count: int, after: int | None) -> list[int]:
        started = time.perf_counter()
        blocks = self.pool.allocate(count, after)
        self._counts.allocator_s += time.perf_counter() - started
        self._counts.allocations += 1
        return blocks


def replay(
    requests: Sequence[Request], kind: type[BlockPool], prefill_blocks: int, decode_blocks: int
) -> Counts:
    """One trace over one pair of workers."""
    counts = Counts()
    prefill = Worker(kind(prefill_blocks, BLOCK_SIZE), Counts())
    decode = Worker(kind(decode_blocks, BLOCK_SIZE), counts)
    for request in requests:
        prefill.advance(request.at_s)
        decode.advance(request.at_s)
        target = decode.admit(request)
        source = prefill.admit(request) if target is not None else None
        if target is None or source is None:
            counts.refused += 1
            if target is not None:
                decode.pool.release(target[0])
            continue
        computed_s = (request.num_prompt - source[1] * BLOCK_SIZE) * PREFILL_S_PER_TOKEN
        counts.cached += target[1]
        counts.wanted += len(target[0])
        calls = len(align_runs(source[0][target[1] :], target[0][target[1] :]))
        if calls:
            counts.calls.append(calls)
            if source[1] == target[1] == 0:  # no prefix on either side; pools are full all the same
                counts.fresh_calls.append(calls)
        prefill.hold(source[0], request.at_s, 0, computed_s)
        growth = request.num_output // BLOCK_SIZE
        decode.hold(target[0], request.at_s + computed_s, growth, BLOCK_SIZE * DECODE_S_PER_TOKEN)
    return counts


def fresh_pool_calls() -> int:
    """The most calls that any of some requests takes whose pools were empty at first."""
    pools = BlockPool(4096, BLOCK_SIZE), BlockPool(9000, BLOCK_SIZE)
    sizes = [1, 2, 3, 500, 64, 1000, 17, 2000]
    return max(len(align_runs(*(pool.allocate(n) for pool in pools))) for n in sizes)


def row_of(trace: str, name: str, counts: Counts, num_requests: int) -> Row:
    """Counts for the table."""

    def part(values: list[int]) -> str:
        if not values:
            return "–"
        middle, most = percentile(values, 50), percentile(values, 99)
        return f"{statistics.mean(values):.2f} / {middle:g} / {most:g}"

    return {
        "trace": trace,
        "allocator": name,
        "requests": num_requests,
        "refused": counts.refused,
        "segments mean/p50/p99": part(counts.segments),
        "calls mean/p50/p99": part(counts.calls),
        "fresh calls mean/p50/p99": part(counts.fresh_calls),
        "hit_ratio": round(counts.cached / max(1, counts.wanted), 4),
        "mean_calls": round(statistics.mean(counts.calls), 3) if counts.calls else None,
        "us_per_allocation": round(counts.allocator_s / max(1, counts.allocations) * 1e6, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description="fragmentation of KV blocks over a replayed trace")
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--prefill-blocks", type=int, default=32_768)
    parser.add_argument("--decode-blocks", type=int, default=131_072)
    parser.add_argument("--out", type=Path, default=RESULTS / "allocator.json")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    targets: list[Target] = []
    for path in arguments.traces:
        requests = list(read_trace(path))
        name = path.name.partition(".")[0]
        for label, kind in (("segments", BlockPool), ("free list", FreeListPool)):
            counts = replay(requests, kind, arguments.prefill_blocks, arguments.decode_blocks)
            rows.append(row_of(name, label, counts, len(requests)))
        targets.append(Target(f"calls per request, {name}", rows[-2]["mean_calls"], 1.5, True))
    targets.append(Target("calls of a request between fresh pools", fresh_pool_calls(), 1.0, True))
    sizes = f"{arguments.prefill_blocks} and {arguments.decode_blocks}"
    notes = [
        f"prefill and decode worker with {sizes} blocks of {BLOCK_SIZE} tokens",
        f"{PREFILL_S_PER_TOKEN * 1e3:g} ms per prompt token, {DECODE_S_PER_TOKEN:g} s per new one",
    ]
    result = document(rows, targets, 0, notes)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
