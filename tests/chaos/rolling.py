"""A mesh with two of everything, and restarts of all its processes in any order under streams."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.gateway_kills import Alone, Gateways, Streams, at_work, fake_alone, learn
from tests.mesh_child import Metrics
from tests.mesh_processes import MODEL, MODEL_FOLDER, Flags, Mesh
from tests.redis_sentinels import Sentinels, redis_sentinels
from tests.waiting import until

KVMANAGERS = ("kvmanager", "kvmanager-b")
SCHEDULERS = ("scheduler", "scheduler-b")
GATEWAYS = ("gateway", "gateway-b")
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
SERVERS = ("redis master", "redis replica")
EVERYTHING = (*KVMANAGERS, *SCHEDULERS, *GATEWAYS, *WORKERS, *SERVERS)

NUM_CLIENTS = 8
MOVING = 4
"""Tokens of each client's streams between two restarts, at least."""

_WORKER: Flags = {
    "engine.fake-step-s": 0.01,
    "engine.dtype": "float32",  # in which tokens do not depend on who is in the same step
    "worker.prefill-slots": 4,
    "worker.decode-slots": 32,
}


@dataclass(frozen=True, slots=True)
class Restarted:
    """What one restart was to its clients.

    Attributes:
        seconds: until all knew of it again.
        streams: that ended meanwhile.
        pause_s: longest time between two tokens of a stream that has ended since.
    """

    name: str
    seconds: float
    streams: int
    pause_s: float


class RollingMesh(Mesh):
    """Two kvmanagers, schedulers and gateways, two workers of each role, Redis with a replica."""

    def __init__(self, folder: Path, servers: Sentinels, engine: str) -> None:
        super().__init__(folder, engine=engine, is_forked=engine == "fake")
        self._servers = servers

    async def bring_up(self) -> None:
        """Starts everything and waits until all know each other."""
        redis = {"redis.url": self._servers.url}
        for name in KVMANAGERS:
            await self.add(name, "kvmanager", redis, sticky=True).ready()
        # Whichever answers: on Kubernetes that is one name with two addresses.
        kvmanagers = "ipv4:" + ",".join(self[name].address for name in KVMANAGERS)
        flags = {**redis, "kvmanager.target": kvmanagers, "routing.aggregate-tokens": 0}
        flags |= {"planning.roles": "off", "planning.substitutes": "off"}
        for name in SCHEDULERS:
            await self.add(name, "scheduler", flags, sticky=True).ready()
        schedulers = ",".join(self[name].address for name in SCHEDULERS)
        more = {**_WORKER, "worker.scheduler-targets": schedulers}
        for name in WORKERS:
            self.add_worker(name, {**more, "worker.kvmanager-target": kvmanagers})
        gateway = {
            **redis,
            "http.port": 0,
            "scheduler.targets": schedulers,
            "model.path": MODEL_FOLDER,
            "model.served-name": MODEL,
        }
        for name in GATEWAYS:
            self.add(name, "gateway", gateway, sticky=True)
        for child in self.children.values():
            await child.ready()
        await until(self.all_know, "all know each other")

    async def all_know(self) -> bool:
        """Whether every scheduler has every worker, and every worker a kvmanager."""
        told = {name: await self[name].metrics() for name in (*KVMANAGERS, *SCHEDULERS)}
        known = [told[name].value("kvmesh_scheduler_workers") for name in SCHEDULERS]
        streams = sum(_streams(told[name]) for name in KVMANAGERS)
        is_up = all(told[name].value("kvmesh_kvmanager_redis_up") == 1 for name in KVMANAGERS)
        return set(known) == {len(WORKERS)} and streams == len(WORKERS) and is_up

    async def roll(self, name: str) -> None:
        """Restarts one of `EVERYTHING` in order, and waits until all know of it again."""
        if name in SERVERS:
            await self._roll_redis(is_master=name == SERVERS[0])
        else:
            self[name].signal(signal.SIGTERM)
            assert await self[name].exit_code() == 0, f"{name} stops in order"
            await self.restart(name)
        await until(self.all_know, f"all know each other after {name}")

    async def _roll_redis(self, *, is_master: bool) -> None:
        await self._servers.has_replica()
        master = await self._servers.master()
        (replica,) = [each for each in self._servers.servers if each is not master]
        ended = master if is_master else replica
        ended.stop()
        if is_master:
            await self._servers.failed_over(master)
        ended.start()
        await self._servers.has_replica()


def _streams(metrics: Metrics) -> float:
    return metrics.value("kvmesh_kvmanager_streams")


@asynccontextmanager
async def rolling_mesh(
    folder: Path, *, engine: str = "fake", shows_logs: bool = True
) -> AsyncIterator[RollingMesh]:
    """It serves; at the end nothing is held anywhere and all exit well."""
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(redis_sentinels(folder))
        mesh = RollingMesh(folder, servers, engine)
        if shows_logs:
            stack.callback(mesh.print_logs)
        stack.callback(mesh.reap)
        await mesh.bring_up()
        yield mesh
        await mesh.idle()
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes


async def restarts(
    mesh: RollingMesh, order: Sequence[str], seed: int, alone: Alone = fake_alone
) -> tuple[list[Restarted], list[str]]:
    """Restarts these one after the other while streams run through both gateways.

    Returns:
        What became of each, and all that clients saw go wrong.
    """
    gateways = Gateways(mesh, GATEWAYS)
    streams = Streams(await learn(gateways, seed, 60, 120, alone))
    found: list[Restarted] = []
    async with at_work(streams, gateways, NUM_CLIENTS):
        for name in order:
            await streams.more(MOVING * NUM_CLIENTS)
            found.append(await _one(mesh, name, streams))
        await streams.more(MOVING * NUM_CLIENTS)
    return found, streams.wrong


async def _one(mesh: RollingMesh, name: str, streams: Streams) -> Restarted:
    ended = streams.kinds.total()
    streams.longest_pause_s = 0.0
    began = time.monotonic()
    await mesh.roll(name)
    seconds = time.monotonic() - began
    await streams.more(MOVING * NUM_CLIENTS)
    return Restarted(
        name,
        seconds,
        streams.kinds.total() - ended,
        streams.longest_pause_s,
    )


def any_order(seed: int) -> list[str]:
    """All of `EVERYTHING`, in an order that this number stands for."""
    return random.Random(seed).sample(EVERYTHING, len(EVERYTHING))
