"""Both ends of a transfer benchmark: pools, a target that lets everything in, a receiver process.

`python -m benchmarks.transfer_ends` is the receiver: it prints its address as one line of JSON and
lives until its standard input ends.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.data_child import announced
from kvmesh.core.types import KvLayout, Refusal, RequestId, Reservation, WorkerId
from kvmesh.kv.handoff import HandoffTable
from kvmesh.kv.handoff_types import BlockGrant
from kvmesh.transfer.channel import KINDS
from kvmesh.transfer.data_server import DataAddress, DataServer, ReceiveOptions
from kvmesh.transfer.frames import CommitFrame, PutFrame
from kvmesh.transfer.memory import create_shared, write_views
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.run_table import indexes_of, runs_of_blocks
from kvmesh.transfer.target import WriteGrant

SENDER, RECEIVER = WorkerId("sender"), WorkerId("receiver")
RECEIVER_MODULE = "benchmarks.transfer_ends"
CAPABILITY = b"bench"
_FOR_EVER_S = 1e9
IN_ORDER, SHUFFLED = 1, 2
"""Reservations: index i is block i, or the block of a random order."""


def layout(block_bytes: int) -> KvLayout:
    """A layout whose blocks have this size."""
    return KvLayout("bench", "float16", 16, 1, 1, block_bytes // (2 * 16 * 2))


class Pool:
    """Blocks in a memfd, every page touched."""

    def __init__(self, num_blocks: int, block_bytes: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.seed = seed
        self.fd, mapping = create_shared("bench", num_blocks * block_bytes)
        self.view = memoryview(mapping)
        piece = random.Random(seed).randbytes(1 << 20)
        for start in range(0, len(self.view), len(piece)):
            end = min(start + len(piece), len(self.view))
            self.view[start:end] = piece[: end - start]

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Bytes of a run."""
        size = self.block_bytes
        return self.view[first_block * size : (first_block + num_blocks) * size]

    write_view = read_view


class OpenTarget:
    """Two reservations of all blocks that never end, with a worker's bookkeeping of who writes."""

    def __init__(self, pool: Pool, order: list[int]) -> None:
        self._pool = pool
        self._handoff = HandoffTable(1, _FOR_EVER_S, pool.block_bytes)
        self._writes: dict[WriteGrant, int] = {}
        for blocks in (list(range(pool.num_blocks)), order):
            self._handoff.reserve(RequestId("bench"), blocks, 0, CAPABILITY, 1, 0.0)

    def begin_write(self, put: PutFrame) -> WriteGrant | Refusal:
        """Memory of the runs."""
        indexes = indexes_of(put.runs, self._pool.num_blocks)
        granted = self._handoff.begin_write(put.claim, indexes, 0.0)
        if isinstance(granted, Refusal):
            return granted
        assert isinstance(granted, BlockGrant), "nobody commits"
        runs = runs_of_blocks(granted.blocks)
        grant = WriteGrant(put, write_views(self._pool, runs, self._pool.block_bytes, put.part))
        self._writes[grant] = granted.write_id
        return grant

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        """The channel left the memory."""
        self._handoff.end_write(self._writes.pop(grant), ok, 0.0)

    def commit(self, frame: CommitFrame) -> Refusal | None:
        """Always."""
        return None

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Nothing is kept."""


def shuffled(num_blocks: int, seed: int) -> list[int]:
    """A random order of all blocks."""
    order = list(range(num_blocks))
    random.Random(seed).shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class ReceiverSpec:
    """What the receiver process is started with."""

    block_bytes: int
    num_blocks: int
    seed: int
    copy_threads: int = 1
    poll_s: float = 0.0


def reservation(address: DataAddress, reservation_id: int, num_blocks: int) -> Reservation:
    """All blocks of the receiver."""
    return Reservation(
        reservation_id=reservation_id,
        worker_id=RECEIVER,
        incarnation=1,
        generation=1,
        capability=CAPABILITY,
        data_endpoint=address.endpoint,
        num_cached_blocks=0,
        num_blocks=num_blocks,
        lease_ms=10_000,
        host_route=address.route,
    )


def processes_of(pids: Iterable[int]) -> tuple[int, ...]:
    """These processes and what they have started: engines run beside their workers."""
    found: dict[int, None] = {}
    left = list(pids)
    while left:
        pid = left.pop()
        found[pid] = None
        for task in Path(f"/proc/{pid}/task").iterdir():
            left += map(int, (task / "children").read_text().split())
    return tuple(found)


async def _serve(spec: ReceiverSpec) -> None:
    pool = Pool(spec.num_blocks, spec.block_bytes, spec.seed + 1)
    target = OpenTarget(pool, shuffled(spec.num_blocks, spec.seed))
    identity = ChannelIdentity(RECEIVER, 1, layout(spec.block_bytes))
    options = ReceiveOptions(
        kinds=KINDS, copy_threads=spec.copy_threads, poll_s=spec.poll_s, stall_timeout_s=30
    )
    server = DataServer(identity, target, options, memory=pool)
    await announced(await server.start())
    await server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_serve(ReceiverSpec(**json.loads(sys.argv[1]))))
