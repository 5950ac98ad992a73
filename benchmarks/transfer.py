"""Data channels against memcpy, iperf3, our own baselines and other transfer engines.

All in one run on one machine. Sender and receiver are two processes; every measurement is repeated
and the smallest, middle and largest are kept.

    python -m benchmarks.transfer                       # everything
    python -m benchmarks.transfer --sizes 1 16 --runs 3 # a quick look
    python -m benchmarks.transfer --nixl-python NIXL/bin/python --mooncake-python MC/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.data_child import data_child
from benchmarks.peer_load import cpu_seconds, figures
from benchmarks.peer_versions import peer_versions, program_version
from benchmarks.result import RESULTS, Row, document, markdown, save, table
from benchmarks.transfer_bare import bare_rows
from benchmarks.transfer_ends import (
    IN_ORDER,
    RECEIVER,
    RECEIVER_MODULE,
    SENDER,
    SHUFFLED,
    OpenTarget,
    Pool,
    ReceiverSpec,
    layout,
    processes_of,
    reservation,
    shuffled,
)
from benchmarks.transfer_peers import equal_congestion_control, iperf_rows, peer_rows
from benchmarks.transfer_targets import SHM_DEFAULT, TCP_DEFAULT, targets_of
from kvmesh.core.cores import usable_cores
from kvmesh.core.types import Reservation
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataAddress, DataServer, ReceiveOptions
from kvmesh.transfer.frames import Checksum
from kvmesh.transfer.lane_width import lanes_by_cores
from kvmesh.transfer.memory import copy_in_python
from kvmesh.transfer.native import address_of
from kvmesh.transfer.nixl_process import is_installed
from kvmesh.transfer.protocol import ChannelIdentity

MIB = 1 << 20
PIECE = 16 << 10
"""Block size of the sweep: contiguous runs and scattered pieces are made of these."""
LAYER_PIECE = 4 << 10
LAYERS, TOKENS, BLOCK_TOKENS = 32, 8192, 16
"""The model of the baselines: 2 KV heads of 64, 16 tokens: 4 KiB per layer and K or V."""
_IN_FLIGHT = 16
CONNECT_S = 30.0
"""Seconds that a connection may take; no row contains them."""
_BASELINES = (SHM_DEFAULT, TCP_DEFAULT)


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our channels under test.

    Attributes:
        copy_threads: of the receiver.
    """

    name: str
    options: SendOptions
    copy_threads: int = 1


POLL_S = 200e-6
CHANNELS = (
    Ours(SHM_DEFAULT, SendOptions(kinds=("shm",), poll_s=POLL_S)),
    Ours(TCP_DEFAULT, SendOptions(kinds=("tcp",), poll_s=POLL_S)),
    Ours("shm, 2 copy threads", SendOptions(kinds=("shm",)), copy_threads=2),
    Ours("tcp x1", SendOptions(kinds=("tcp",), lanes=1, checksum=Checksum.NONE)),
    Ours("tcp x2", SendOptions(kinds=("tcp",), lanes=2, checksum=Checksum.NONE)),
    Ours("tcp x4", SendOptions(kinds=("tcp",), lanes=4, checksum=Checksum.NONE)),
    Ours("tcp x2 crc32c", SendOptions(kinds=("tcp",), lanes=2, checksum=Checksum.CRC32C)),
)
NIXL_CHANNEL = Ours(
    "nixl channel (ours)", SendOptions(kinds=("nixl",), connect_timeout_s=20, stall_timeout_s=30)
)
"""By whatever UCX finds: within one host that is a copy from process to process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...]
    runs: int
    seed: int

    @property
    def pool_blocks(self) -> int:
        """Room for four of the largest transfers."""
        return 4 * max(self.sizes) * MIB // PIECE


async def measure(
    work: Callable[[], Awaitable[None]],
    runs: int,
    num_bytes: int,
    pids: Sequence[int],
    *,
    warm: bool = True,
) -> Row:
    """Repeats a transfer, with `warm` after one that does not count."""
    if warm:
        await work()
    seconds, cpu = [], sum(cpu_seconds(pid) for pid in pids)
    for _ in range(runs):
        started = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started)
    cpu = sum(cpu_seconds(pid) for pid in pids) - cpu
    return figures(num_bytes, seconds, cpu)


def runs_of(shape: str, num_blocks: int, first: int, plan: Plan) -> list[Run]:
    """Runs of one transfer: one, or single blocks out of a random order."""
    if shape == "contiguous":
        return [Run(first, first, num_blocks)]
    order = list(range(first, first + num_blocks))
    random.Random(plan.seed + first).shuffle(order)
    return [Run(block, first + index, 1) for index, block in enumerate(order)]


async def put_all(
    pool: ChannelPool, target: Reservation, transfers: Sequence[Sequence[Run]]
) -> None:
    """Several transfers at once."""
    await asyncio.gather(*(pool.put(target, runs) for runs in transfers))


async def put_each(pool: ChannelPool, target: Reservation, calls: Sequence[Run]) -> None:
    """One call per run, some under way at once."""
    left = iter(calls)

    async def caller() -> None:
        for run in left:
            await pool.put(target, [run])

    await asyncio.gather(*(caller() for _ in range(_IN_FLIGHT)))


async def sweep(
    name: str, pool: ChannelPool, address: DataAddress, pids: Sequence[int], plan: Plan
) -> list[Row]:
    """All sizes and shapes over one channel."""
    rows = []
    for mib in plan.sizes:
        for shape, reservation_id in (("contiguous", IN_ORDER), ("16 KiB pieces", SHUFFLED)):
            for concurrent in (1, 4):
                target = reservation(address, reservation_id, plan.pool_blocks)
                count = mib * MIB // PIECE
                transfers = [runs_of(shape, count, i * count, plan) for i in range(concurrent)]

                work = functools.partial(put_all, pool, target, transfers)
                measured = await measure(work, plan.runs, concurrent * mib * MIB, pids)
                rows.append(
                    {"what": name, "shape": shape, "mib": mib, "concurrent": concurrent, **measured}
                )
    return rows


async def latency(
    name: str, pool: ChannelPool, address: DataAddress, pids: Sequence[int]
) -> list[Row]:
    """A small handoff: 64 KiB written, and the same with its commit."""
    target = reservation(address, IN_ORDER, 64)
    runs = [Run(0, 0, 4)]

    async def put() -> None:
        await pool.put(target, runs)

    async def put_and_commit() -> None:
        await pool.put(target, runs)
        await pool.commit(target, 1, 1)

    rows = []
    for shape, work in (("64 KiB put", put), ("64 KiB put and commit", put_and_commit)):
        await measure(work, 50, 4 * PIECE, pids)
        measured = await measure(work, 500, 4 * PIECE, pids)
        rows.append({"what": name, "shape": shape, "mib": 0.0625, "concurrent": 1, **measured})
    return rows


async def ours(channel: Ours, plan: Plan) -> list[Row]:
    """One channel between two processes."""
    spec = ReceiverSpec(
        PIECE, plan.pool_blocks, plan.seed, channel.copy_threads, channel.options.poll_s
    )
    source = Pool(plan.pool_blocks, PIECE, plan.seed)
    with data_child(RECEIVER_MODULE, spec) as receiver:
        options = dataclasses.replace(channel.options, connect_timeout_s=CONNECT_S)
        pool = ChannelPool(ChannelIdentity(SENDER, 1, layout(PIECE)), source, options)
        await pool.put(reservation(receiver.address, IN_ORDER, 1), [Run(0, 0, 1)])
        pids = processes_of((os.getpid(), receiver.pid))
        rows = await latency(channel.name, pool, receiver.address, pids)
        rows += await sweep(channel.name, pool, receiver.address, pids, plan)
        await pool.close()
    os.close(source.fd)
    return rows


async def within_the_process(plan: Plan) -> list[Row]:
    """The local channel: both ends here."""
    source = Pool(plan.pool_blocks, PIECE, plan.seed)
    target = OpenTarget(
        Pool(plan.pool_blocks, PIECE, plan.seed + 1), shuffled(plan.pool_blocks, plan.seed)
    )
    server = DataServer(ChannelIdentity(RECEIVER, 1, layout(PIECE)), target, ReceiveOptions())
    address = await server.start()
    options = SendOptions(kinds=("local",))
    pool = ChannelPool(ChannelIdentity(SENDER, 1, layout(PIECE)), source, options)
    rows = await latency("local", pool, address, (os.getpid(),))
    rows += await sweep("local", pool, address, (os.getpid(),), plan)
    await pool.close()
    await server.close()
    return rows


async def _called(work: Callable[[], None]) -> None:
    work()


async def memcpy(plan: Plan) -> list[Row]:
    """One thread in one process, between two shared memories."""
    source, target = (Pool(plan.pool_blocks, PIECE, plan.seed + i) for i in range(2))
    order = shuffled(plan.pool_blocks, plan.seed)
    rows = []
    for mib in plan.sizes:
        count = mib * MIB // PIECE
        whole_from = np.frombuffer(source.read_view(0, count), dtype=np.uint8)
        whole_to = np.frombuffer(target.read_view(0, count), dtype=np.uint8)
        pieces_from = [
            (address_of(source.read_view(run.source_start, 1)), PIECE)
            for run in runs_of("", count, 0, plan)
        ]
        pieces_to = [target.read_view(block, 1) for block in order[:count]]

        copies: dict[str, Callable[[], None]] = {
            "contiguous": functools.partial(np.copyto, whole_to, whole_from),
            "16 KiB pieces": functools.partial(copy_in_python, pieces_to, pieces_from),
        }
        for shape, copy in copies.items():
            work = functools.partial(_called, copy)
            measured = await measure(work, plan.runs, mib * MIB, (os.getpid(),))
            rows.append({"what": "memcpy", "shape": shape, "mib": mib, "concurrent": 1, **measured})
    return rows


async def baselines(plan: Plan, channels: Sequence[Ours]) -> list[Row]:
    """A 32-layer prompt of 8k tokens: one call, one per block, one per layer, K or V, and block."""
    per_block = 2 * LAYERS
    count = TOKENS // BLOCK_TOKENS * per_block
    rows = []
    for channel in channels:
        source = Pool(count, LAYER_PIECE, plan.seed)
        spec = ReceiverSpec(LAYER_PIECE, count, plan.seed)
        with data_child(RECEIVER_MODULE, spec) as receiver:
            identity = ChannelIdentity(SENDER, 1, layout(LAYER_PIECE))
            pool = ChannelPool(identity, source, channel.options)
            target = reservation(receiver.address, IN_ORDER, count)
            for shape, length in (("aligned", count), ("blockwise", per_block), ("layerwise", 1)):
                calls = [Run(first, first, length) for first in range(0, count, length)]

                work = functools.partial(put_each, pool, target, calls)
                pids = (os.getpid(), receiver.pid)
                # The first of its 32,768 calls are warm-up enough, and it takes seconds.
                warm = shape != "layerwise"
                measured = await measure(work, plan.runs, count * LAYER_PIECE, pids, warm=warm)
                mib = count * LAYER_PIECE // MIB
                head = {"what": channel.name, "shape": shape, "mib": mib, "concurrent": 1}
                rows.append({**head, **measured, "calls": len(calls)})
            await pool.close()
        os.close(source.fd)
    return rows


async def run(plan: Plan, pythons: Mapping[str, Path]) -> list[Row]:
    """Everything, one after the other."""
    rows: list[Row] = []

    started = time.monotonic()

    def add(more: list[Row]) -> None:
        rows.extend(more)
        sys.stderr.write("\n".join(table(more)[2:]) + "\n")
        sys.stderr.write(f"-- {time.monotonic() - started:.0f} s\n")

    add(await memcpy(plan))
    add(await within_the_process(plan))
    for channel in CHANNELS:
        add(await ours(channel, plan))
    if is_installed():
        add(await ours(NIXL_CHANNEL, plan))
    add(iperf_rows(plan.sizes, plan.runs))
    add(bare_rows(plan.sizes, plan.runs, plan.seed))
    add(await baselines(plan, [channel for channel in CHANNELS if channel.name in _BASELINES]))
    add(peer_rows(pythons, plan.sizes, plan.runs, plan.seed))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="MiB")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    for engine in ("nixl", "mooncake"):
        parser.add_argument(f"--{engine}-python", type=Path, help=f"interpreter that has {engine}")
    parser.add_argument("--out", type=Path, default=RESULTS / "transfer.json")
    arguments = parser.parse_args(argv)
    plan = Plan(tuple(arguments.sizes), arguments.runs, arguments.seed)
    if arguments.nixl_python is None and is_installed():
        arguments.nixl_python = Path(sys.executable)
    found = {"nixl": arguments.nixl_python, "mooncake": arguments.mooncake_python}
    pythons = {name: python for name, python in found.items() if python}
    peers = program_version("iperf3") | peer_versions(pythons)
    with equal_congestion_control() as congestion:
        rows = uvloop.run(run(plan, pythons))
    notes = [
        "gb_s, ms: min / median / max; GB is 1e9 bytes; cpu_s_per_gib: both ends together",
        "default: as workers ship (lanes by cores and gain, crc32c, polling); the others are tuned",
        f"tcp channels and iperf3 set cubic; peers take the system's, here {congestion}",
        "iperf3: rate of two seconds over warm connections",
        "NIXL: no progress thread at the end that sends; Mooncake: with its connection pool",
        "bare: sockets and threads alone; lent: as tcp channels do, without the sender's copy",
        "bare, sendfile: out of the sender's memfd, without its copy",
        f"polling: both ends look for a frame for {POLL_S * 1e6:.0f} us, then sleep",
        "pieces lie in a random order at both ends; receivers keep a worker's books of who writes",
        f"blockwise and layerwise: one call per piece, {_IN_FLIGHT} under way",
    ]
    streams = lanes_by_cores(usable_cores())
    result = document(rows, targets_of(rows, streams), plan.seed, notes, peers)
    save(result, arguments.out)
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
