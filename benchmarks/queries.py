"""Queries that travel to a prefix against a prefix that is fetched, or computed again.

A holder process has random KV of a random Llama's layout. Measured is one layer's question, its
round trip and the attention alone, and whole prompts: new tokens behind a prefix that is asked,
fetched and then attended here, or computed.

    python -m benchmarks.queries [--dtype float32]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.data_child import data_child
from benchmarks.query_holder import CLAIM, HOLDER, INCARNATION, HolderSpec
from benchmarks.query_report import LAYER, PROMPT, notes, targets
from benchmarks.random_llama import SHAPES, Shape, write_checkpoint
from benchmarks.result import RESULTS, Row, document, save, spread
from kvmesh.core.clock import SystemClock
from kvmesh.core.types import SamplingParams, WorkerId
from kvmesh.engine.protocol import RemotePrefix, SequenceChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.data_server import DataAddress
from kvmesh.transfer.frames import BlockRun, Checksum
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.reader import BlockReader, ReadLease
from kvmesh.transfer.remote_blocks import RemoteBlocks

BLOCK = 16
CHUNK = 512
PREFIXES = (256, 1024, 3968)
NEW = (1, 16, 64)
CHANNELS = ("shm", "tcp")
_LONG = 2000
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Ends:
    """An asking engine and its holder over one kind of channel."""

    runner: TorchRunner
    shape: Shape
    channel: str
    asker: Asker
    reader: BlockReader
    lease: ReadLease

    @property
    def holder(self) -> Holder:
        """Who is asked."""
        return Holder.of_lease(self.lease)


def ends(runner: TorchRunner, shape: Shape, channel: str, address: DataAddress) -> Ends:
    """Both ways to a holder."""
    identity = ChannelIdentity(WorkerId("asker"), 1, runner.spec.layout)
    options = SendOptions(kinds=(channel,), checksum=Checksum.CRC32C, stall_timeout_s=30)
    lease = ReadLease(
        CLAIM.reservation_id,
        HOLDER,
        INCARNATION,
        CLAIM.generation,
        CLAIM.capability,
        address.endpoint,
        address.route,
    )
    asker = Asker(identity, options, SystemClock())
    return Ends(runner, shape, channel, asker, BlockReader(identity, options), lease)


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each run."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append((time.perf_counter() - started) * 1e3)
    return found


def measure_layer(to: Ends, new: int, prefix: int, repeats: int) -> Row:
    """One question with its answer, and its attention without a way."""
    shape, layout = to.shape, to.runner.spec.layout
    dtype = to.runner.kv.tensor.dtype
    blocks = range(prefix // BLOCK)
    queries = torch.randn(new, shape.heads, shape.head_dim).to(dtype)
    operand = queries.view(torch.uint8).numpy().data.cast("B")
    remote = RemoteBlocks(to.asker, to.holder, blocks)
    here = to.runner.partial_attention
    assert here is not None

    def ask() -> None:
        remote.ask(0, operand, queries.shape, 0.125).wait()

    def attend() -> None:
        here.attend(0, blocks, operand, 0.125)

    for work in (ask, attend):
        work()
    return {
        "what": LAYER,
        "channel": to.channel,
        "new": new,
        "prefix": prefix,
        "ask_ms": spread(timed(ask, repeats)),
        "attend_ms": spread(timed(attend, repeats)),
        "query_kib": round(2 * operand.nbytes / 1024 * layout.num_layers, 1),
        "prefix_kib": round(len(blocks) * layout.block_bytes / 1024, 1),
    }


def run_chunks(runner: TorchRunner, tokens: Sequence[int], remote: RemotePrefix | None) -> None:
    """Computes a prompt chunk by chunk, behind a remote prefix or from its beginning."""
    start = remote.blocks.stop * BLOCK if remote is not None else 0
    table = list(range(-(-len(tokens) // BLOCK)))
    _steps(runner, tokens, table, start, remote)


def _steps(
    runner: TorchRunner,
    tokens: Sequence[int],
    table: list[int],
    start: int,
    remote: RemotePrefix | None,
) -> None:
    while start < len(tokens):
        end = min(start + CHUNK, len(tokens))
        last = end == len(tokens)
        chunk = SequenceChunk(
            1, tokens, start, end, table, len(tokens), _GREEDY, sample=last, remote=remote
        )
        result = runner.execute([chunk])
        assert not result.lost, "an answer did not come"
        start = end


async def measure_prompt(
    to: Ends, new: int, prefix: int, repeats: int, computed_ms: Sequence[float]
) -> Row:
    """A whole prompt, three ways."""
    runner = to.runner
    tokens = [3 + index % 1000 for index in range(prefix + new)]
    blocks = range(prefix // BLOCK)
    remote = RemotePrefix(blocks, RemoteBlocks(to.asker, to.holder, blocks))

    def ask() -> None:
        run_chunks(runner, tokens, remote)

    def rest() -> None:
        _steps(runner, tokens, list(range(-(-len(tokens) // BLOCK))), prefix, None)

    async def fetch() -> float:
        started = time.perf_counter()
        view = runner.kv.write_view(0, len(blocks))
        await to.reader.get(to.lease, [BlockRun(0, len(blocks))], [view])
        await asyncio.to_thread(rest)
        return (time.perf_counter() - started) * 1e3

    await asyncio.to_thread(ask)
    await fetch()
    asked = await asyncio.to_thread(timed, ask, repeats)
    fetched = [await fetch() for _ in range(repeats)]
    return {
        "what": PROMPT,
        "channel": to.channel,
        "new": new,
        "prefix": prefix,
        "asked_ms": spread(asked, 1),
        "fetched_ms": spread(fetched, 1),
        "computed_ms": spread(computed_ms, 1),
    }


async def measure(runner: TorchRunner, shape: Shape, address: DataAddress) -> list[Row]:
    """All rows."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()

    tos = [ends(runner, shape, channel, address) for channel in CHANNELS]
    for to in tos:
        for prefix in PREFIXES:
            for new in NEW:
                add(await asyncio.to_thread(measure_layer, to, new, prefix, 20))
    computed: list[float] = []
    for prefix in PREFIXES:
        for new in NEW:
            is_long = prefix > _LONG
            if not is_long or new == NEW[0]:  # some more tokens are nothing to a long prefix
                tokens = [3 + index % 1000 for index in range(prefix + new)]
                compute = partial(run_chunks, runner, tokens, None)
                computed = await asyncio.to_thread(timed, compute, 1 if is_long else 3)
            for to in tos:
                add(await measure_prompt(to, new, prefix, 5, computed))
    for to in tos:
        await asyncio.to_thread(to.asker.close)
        await to.reader.close()
    return rows


def main() -> None:
    """Measures and writes bench/results/queries.*."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="110M", choices=tuple(SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=RESULTS / "queries.json")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    num_blocks = (max(PREFIXES) + max(NEW)) // BLOCK + 1
    with tempfile.TemporaryDirectory() as folder:
        runner = TorchRunner.load(
            write_checkpoint(shape, Path(folder), options.seed),
            served_name="random",
            dtype=options.dtype,
            num_blocks=num_blocks,
            block_size=BLOCK,
        )
        spec = HolderSpec(runner.spec.layout, num_blocks, shape.heads, options.seed)
        with data_child("benchmarks.query_holder", spec) as holder:
            rows = asyncio.run(measure(runner, shape, holder.address))
        runner.close()
    about = [
        f"random Llama of {shape.name}, {options.dtype}, one thread per process, chunks of {CHUNK}",
        "ask: question and answer of one layer; attend: its attention in this process",
        "fetched: read by GET under a lease that is there already, then attended here",
        "query_kib: queries and outputs of all layers; prefix_kib: the prefix's KV",
        "fastest: " + "; ".join(notes(rows)),
    ]
    result = document(rows, targets(rows, max(PREFIXES)), options.seed, about)
    save(result, options.save)


if __name__ == "__main__":
    main()
