"""`make soak MINUTES=n`: a mesh of real processes under mixed load, whose parts are killed, paused
and drained at random. Every answer is that of an undisturbed mesh, every request ends once, and in
every pause nothing is held and no process has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.soak_cases import some_cases, with_stop
from tests.chaos.soak_faults import Faults
from tests.chaos.soak_load import SoakClients
from tests.mesh_child import Child
from tests.mesh_processes import Flags, Mesh
from tests.redis_server import redis_process

NUM_CASES = 120
NUM_CLIENTS = 8
ROUND_S = 60.0
# Files of caches and connections that come and go; a leak per request is in the hundreds.
MORE_FILES = 24
# In pauses; torch's libraries keep what they compiled for each number of rows.
MORE_MIB = {"fake": 96, "kvmesh": 256}
SHOWN = 10

_SMALL: Flags = {
    # Few blocks, so that sequences are preempted, and little memory to keep them.
    "engine.num-blocks": 96,
    "engine.swap-gib": 0.0001,
    "engine.fake-step-s": 0.003,
    "engine.max-batch-tokens": 128,
    "worker.prefill-slots": 3,
    "worker.decode-slots": 12,
}


@dataclass(frozen=True, slots=True)
class Held:
    """What a process has while nothing is asked."""

    files: int
    mib: int


@dataclass
class Growth:
    """What processes have in pauses, by name and life; the first pause of a life is its measure.

    Attributes:
        more_mib: that a process may have beyond it.
    """

    more_mib: int
    first: dict[tuple[str, int], Held] = field(default_factory=dict)

    def check(self, children: list[Child]) -> list[str]:
        """Which have grown."""
        found = []
        for child in children:
            now = _held(child)
            before = self.first.setdefault((child.name, child.lives), now)
            if now.files > before.files + MORE_FILES or now.mib > before.mib + self.more_mib:
                found.append(f"{child.name} has grown from {before} to {now}")
        return found


def _held(child: Child) -> Held:
    assert child.process is not None
    process = Path(f"/proc/{child.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return Held(len(list((process / "fd").iterdir())), pages * resource.getpagesize() >> 20)


async def learn(clients: SoakClients, seed: int, *, structures: bool) -> None:
    """Asks for everything once, and for some of it again with a stop string."""
    draw = random.Random(f"stops {seed}")
    for case in some_cases(NUM_CASES, seed, structures=structures):
        said = await clients.learn(case)
        clients.known.append((case, said))
        stopped = with_stop(case, said, draw) if draw.random() < 0.2 else case
        if stopped is not case:
            clients.known.append((stopped, await clients.learn(stopped)))


async def soak(
    mesh: Mesh, clients: SoakClients, seconds: float, seed: int, num_clients: int, growth: Growth
) -> list[str]:
    """Runs rounds until the time is over; what was found."""
    faults = Faults(mesh, random.Random(f"faults {seed}"))
    found: list[str] = []
    deadline = time.monotonic() + seconds
    number = 0
    while not found and (left := deadline - time.monotonic()) > 0:
        number += 1
        async with clients.at_work(num_clients, seed * 1000 + number):
            await faults.run(min(left, ROUND_S))
        await mesh.all_known()
        await mesh.idle()
        found = [*clients.wrong[:SHOWN], *growth.check(list(mesh.children.values()))]
        if clients.outcomes.total() != clients.sent:
            found.append(f"{clients.sent} requests have {clients.outcomes.total()} ends")
        print(
            f"round {number}: {clients.sent} requests, {dict(clients.outcomes)}; "
            f"{dict(faults.done)}; {await _preemptions(mesh)} preemptions of who lives",
            flush=True,
        )
    return found + _too_many(clients.outcomes)


async def _preemptions(mesh: Mesh) -> int:
    metrics = [await worker.metrics() for worker in mesh.workers]
    return sum(int(each.value("vllm:num_preemptions_total")) for each in metrics)


def _too_many(outcomes: Counter[str]) -> list[str]:
    """Losses that are honest are few all the same."""
    bad = outcomes["lost"] + outcomes["refused"]
    return [f"{bad} requests were refused or lost"] if bad * 10 > outcomes.total() else []


async def run(seconds: float, seed: int, engine: str, num_clients: int) -> int:
    """Starts a mesh and soaks it; 1 if something was found."""
    folder = Path(tempfile.mkdtemp(prefix="kvmesh-soak-"))
    print(f"seed {seed}, logs in {folder}", flush=True)
    workers = {"prefill": _SMALL, "decode": _SMALL}
    mesh = Mesh(folder, engine=engine, flags=workers)
    async with AsyncExitStack() as stack:
        mesh.redis = stack.enter_context(redis_process(folder))
        stack.callback(mesh.reap)
        await mesh.start(2, 2)
        clients = SoakClients(mesh.url)
        await learn(clients, seed, structures=engine == "kvmesh")
        print(f"{len(clients.known)} requests are known", flush=True)
        growth = Growth(MORE_MIB[engine])
        found = await soak(mesh, clients, seconds, seed, num_clients, growth)
        codes = await mesh.stop()
        if set(codes.values()) - {0}:
            found.append(f"exit codes: {codes}")
        found += mesh.failures()[:SHOWN]
    for line in found:
        print(f"FOUND {line}")
    print("nothing was found" if not found else f"{len(found)} found; logs in {folder}")
    return 1 if found else 0


def main() -> int:
    """Reads the arguments; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("fake", "kvmesh"), default="fake")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    options = parser.parse_args()
    return asyncio.run(run(options.minutes * 60, options.seed, options.engine, options.clients))


if __name__ == "__main__":
    sys.exit(main())
