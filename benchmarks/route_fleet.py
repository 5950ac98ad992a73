"""Workers that do nothing but tell who they are and what they hold, for `benchmarks.route_path`.

    python -m benchmarks.route_fleet SCHEDULER KVMANAGER FIRST END

Each has the registration and the publisher that a worker has; documents are dealt out among them.
This process plays the workers from number FIRST to END - 1. It writes the number of those that
are not registered once all have tried; ends with its input.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import resource
import sys
from dataclasses import dataclass

import uvloop

from kvmesh.core.details import WorkerDetail
from kvmesh.core.types import (
    BlockHash,
    Endpoint,
    KvLayout,
    Role,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.kv.block_news import BlockEvents
from kvmesh.rpc.publisher import BlockPublisher, PublisherFacts
from kvmesh.rpc.registration import OperatorHooks, SchedulerRegistration

MODEL = "bench"
BLOCK_SIZE = 16
DOCUMENT_BLOCKS = 1_900
"""Of a prompt of 30,000 tokens."""

NUM_DOCUMENTS = 200
HOLDERS = 5
"""Workers that hold a document."""

LAYOUT = KvLayout(MODEL, "bfloat16", BLOCK_SIZE, 32, 8, 128)
PLACE = Endpoint("127.0.0.1", 1)
NUM_BLOCKS = 10_000
JOIN_AT_ONCE = 50
"""Workers of a process that connect at a time."""

JOIN_S = 60.0
"""Seconds that a worker has to join."""

COLLECT_AFTER = 200_000
"""New objects after which the garbage collector runs, as in the scheduler: a worker's own process
has a thousandth of the objects of this one."""


def document(number: int) -> tuple[BlockHash, ...]:
    """Hashes of a document's blocks; of one with a negative number nobody holds any."""
    blocks = (f"{number}:{block}".encode() for block in range(DOCUMENT_BLOCKS))
    return tuple(BlockHash(hashlib.blake2b(each, digest_size=16).digest()) for each in blocks)


@functools.cache
def _held(number: int) -> list[BlockHash]:
    """The document of a worker, shared by all of its holders in this process."""
    return list(document(number // HOLDERS % NUM_DOCUMENTS))


@dataclass
class Holder:
    """Block events of a simulated worker, as its publisher collects them."""

    stored: list[BlockHash]

    def take(self) -> BlockEvents:
        """All of it at the first call."""
        stored, self.stored = self.stored, []
        return BlockEvents(stored, [])


def worker_info(number: int) -> WorkerInfo:
    """A worker of the fleet."""
    return WorkerInfo(
        worker_id=WorkerId(f"worker-{number:05}"),
        incarnation=1,
        role=Role.DECODE if number % 2 else Role.PREFILL,
        cluster="home",
        control_endpoint=PLACE,
        data_endpoint=PLACE,
        model=MODEL,
        layout=LAYOUT,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        prefill_slots=4,
        decode_slots=64,
        num_blocks=NUM_BLOCKS,
    )


def publisher(target: str, number: int) -> BlockPublisher:
    """The publisher of a worker that holds one document."""
    info = worker_info(number)
    held = _held(number)
    holder = Holder(list(held))
    facts = PublisherFacts(
        info.worker_id, info.incarnation, info.cluster, LAYOUT.model_fingerprint, BLOCK_SIZE
    )
    return BlockPublisher(target, facts, take_events=holder.take, held_hashes=lambda: held)


async def run(scheduler: str, kvmanager: str, numbers: range) -> None:
    """These workers of the fleet, until the input ends."""
    loop = asyncio.get_running_loop()
    load = WorkerLoad(blocks_free=NUM_BLOCKS)
    operator = OperatorHooks(
        WorkerDetail, lambda _, __: None, lambda _, __, ___: None, lambda _: None
    )
    joining = asyncio.Semaphore(JOIN_AT_ONCE)
    async with asyncio.TaskGroup() as tasks:

        async def join(number: int) -> bool:
            async with joining:
                registration = SchedulerRegistration(
                    [scheduler],
                    worker_info(number),
                    lambda: load,
                    lambda _: None,
                    operator=operator,
                )
                tasks.create_task(registration.run())
                if number < NUM_DOCUMENTS * HOLDERS:
                    tasks.create_task(publisher(kvmanager, number).run())
                return await registration.wait_registered(JOIN_S)

        joined = await asyncio.gather(*map(join, numbers))
        gc.collect()
        gc.freeze()
        sys.stdout.write(f"{joined.count(False)}\n")
        sys.stdout.flush()
        await loop.run_in_executor(None, sys.stdin.readline)
        raise SystemExit(0)


def main() -> None:
    """Runs the fleet."""
    scheduler, kvmanager, first, end = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    uvloop.run(run(scheduler, kvmanager, range(int(first), int(end))))


if __name__ == "__main__":
    main()
