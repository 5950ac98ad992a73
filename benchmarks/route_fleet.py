"""Workers that do nothing but tell who they are and what they hold, for `benchmarks.route_path`.

    python -m benchmarks.route_fleet SCHEDULER KVMANAGER NUM_WORKERS

Each has the registration and the publisher that a worker has; documents are dealt out among them.
Writes a line when all are registered and all that they hold is known; ends with its input.
"""

from __future__ import annotations

import asyncio
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
JOIN_AT_ONCE = 200
"""Workers that begin to connect in the same moment."""


def document(number: int) -> tuple[BlockHash, ...]:
    """Hashes of a document's blocks; of one with a negative number nobody holds any."""
    blocks = (f"{number}:{block}".encode() for block in range(DOCUMENT_BLOCKS))
    return tuple(BlockHash(hashlib.blake2b(each, digest_size=16).digest()) for each in blocks)


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
    held = list(document(number // HOLDERS % NUM_DOCUMENTS))
    holder = Holder(list(held))
    facts = PublisherFacts(
        info.worker_id, info.incarnation, info.cluster, LAYOUT.model_fingerprint, BLOCK_SIZE
    )
    return BlockPublisher(target, facts, take_events=holder.take, held_hashes=lambda: held)


async def run(scheduler: str, kvmanager: str, num_workers: int) -> None:
    """The fleet, until its input ends."""
    loop = asyncio.get_running_loop()
    load = WorkerLoad(blocks_free=NUM_BLOCKS)
    operator = OperatorHooks(
        WorkerDetail, lambda _, __: None, lambda _, __, ___: None, lambda _: None
    )
    joined: list[SchedulerRegistration] = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_workers):
            registration = SchedulerRegistration(
                [scheduler],
                worker_info(number),
                lambda: load,
                lambda _: None,
                operator=operator,
            )
            joined.append(registration)
            tasks.create_task(registration.run())
            if number < NUM_DOCUMENTS * HOLDERS:
                tasks.create_task(publisher(kvmanager, number).run())
            if number % JOIN_AT_ONCE == JOIN_AT_ONCE - 1:
                for each in joined:
                    await each.wait_registered(60.0)
        for each in joined:
            await each.wait_registered(60.0)
        missing = sum(not each.num_registered for each in joined)
        sys.stdout.write(f"{missing}\n")
        sys.stdout.flush()
        await loop.run_in_executor(None, sys.stdin.readline)
        raise SystemExit(0)


def main() -> None:
    """Runs the fleet."""
    scheduler, kvmanager, num_workers = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(run(scheduler, kvmanager, int(num_workers)))


if __name__ == "__main__":
    main()
