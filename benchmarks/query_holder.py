"""The holder of a query benchmark: a process with a pool of random KV that answers and gives it.

`python -m benchmarks.query_holder SPEC` prints its address as one line of JSON and lives until its
standard input ends.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.data_child import announced
from kvmesh.core.types import KvLayout, Refusal, WorkerId
from kvmesh.engine.kv_cache import HostKvPool
from kvmesh.engine.partial import PoolAttention
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.runtime.query_answers import QueryAnswers
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.transfer.attend import ClaimKind
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.frames import CommitFrame, GetFrame, PutFrame
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.target import ReadGrant, WriteGrant

HOLDER = WorkerId("holder")
INCARNATION = 1
CLAIM = WriteClaim(1, INCARNATION, 1, b"bench")


@dataclass(frozen=True, slots=True)
class HolderSpec:
    """What the holder is started with."""

    layout: KvLayout
    num_blocks: int
    num_heads: int
    seed: int


class _Open:
    """Gives all blocks to everybody, and takes none."""

    def __init__(self, pool: HostKvPool) -> None:
        self._pool = pool

    def claimed_blocks(self, claim: WriteClaim) -> Sequence[int]:
        return range(self._pool.num_blocks)

    def begin_read(self, get: GetFrame) -> ReadGrant:
        return ReadGrant(get, [self._pool.read_view(run.first, run.count) for run in get.runs])

    def end_read(self, grant: ReadGrant) -> None:
        """Nothing is kept."""

    def begin_write(self, put: PutFrame) -> WriteGrant | Refusal:
        raise AssertionError("nothing is written")

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        """Nothing was granted."""

    def commit(self, frame: CommitFrame) -> Refusal | None:
        raise AssertionError("nothing is written")

    def peer_lost(self, worker_id: WorkerId) -> None:
        """Nothing is kept."""


async def _serve(spec: HolderSpec) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    pool = HostKvPool(spec.layout, spec.num_blocks)
    pool.tensor.normal_()
    blocks = BlockPool(spec.num_blocks, spec.layout.block_size)
    blocks.allocate(spec.num_blocks)
    everything = _Open(pool)
    server = DataServer(
        ChannelIdentity(HOLDER, INCARNATION, spec.layout),
        everything,
        ReceiveOptions(stall_timeout_s=30),
        source=everything,
        queries=QueryAnswers(
            spec.layout,
            blocks,
            PoolAttention(pool, spec.num_heads),
            {ClaimKind.LEASE: everything},
            QueryMetrics(CollectorRegistry()),
        ),
    )
    await announced(await server.start())
    await server.close()
    pool.close()


def _spec(text: str) -> HolderSpec:
    fields = json.loads(text)
    return HolderSpec(**(fields | {"layout": KvLayout(**fields["layout"])}))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_serve(_spec(sys.argv[1])))
