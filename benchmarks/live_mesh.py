"""A mesh of real processes with modelled devices, whose scheduler can be another one between loads.

Built on the processes of the end-to-end tests. At the end of every load nothing may be held.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.live_link import FarLink
from benchmarks.live_load import CHUNK_TOKENS, Arrival, Limits, Seen, live_row, send
from benchmarks.result import Row
from tests.mesh_child import Child, Metrics, scrape
from tests.mesh_processes import BLOCK_SIZE, MODEL, MODEL_FOLDER, Flags, Mesh
from tests.redis_server import redis_process
from tests.waiting import until

READY_S = 60.0
FAR = "far"
"""Name of the cluster behind a link."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers to start, and what they are.

    Attributes:
        workers: number by name of a kind: `prefill` and `decode` are at home, `remote` prefills in
            the far cluster.
        devices: of the profile, by name of a kind.
        token_bytes: KV of a token.
        slots: prompts that a prefill worker holds at once.
    """

    workers: Mapping[str, int]
    devices: Mapping[str, str]
    token_bytes: int
    slots: int = 2
    num_tokens: int = 65_536
    flags: Flags = field(default_factory=dict)


class LiveMesh(Mesh):
    """The processes of one fleet.

    Args:
        profile: file of the devices.
        limits: requests that nobody takes within the first one are refused.
        link: to the far cluster; None has none.
    """

    def __init__(
        self, folder: Path, fleet: Fleet, profile: Path, limits: Limits, link: FarLink | None
    ) -> None:
        quiet: Flags = {"telemetry.trace.exporter": "none"}
        super().__init__(folder, flags=dict.fromkeys(("kvmanager",), quiet))
        self._fleet = fleet
        self._profile = profile
        self._limits = limits
        self._link = link
        self._sent = 0.0

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self._link is None else self._link.near

    def _service(self, name: str, flags: Flags, **more: Any) -> Child:
        quiet = {"telemetry.trace.exporter": "none", "server.host": self._host}
        return self.add(name, more.pop("service", name), {**quiet, **flags}, **more)

    async def bring_up(self, scheduler: Flags, kvmanager: Flags) -> None:
        """Starts everything and waits until requests can be served."""
        assert self.redis is not None
        redis = {"redis.url": self.redis.url}
        await self._service("kvmanager", {**redis, **kvmanager}, sticky=True).ready()
        flags = {**redis, "kvmanager.target": self["kvmanager"].address, "server.admin.port": 0}
        flags |= {"kvmanager.timeout-s": 0.5, **scheduler}
        await self._service("scheduler", flags, sticky=True).ready()
        for kind, count in self._fleet.workers.items():
            for number in range(count):
                self.start_worker(f"{kind}-{number}")
        gateway = {
            "http.port": 0,
            "http.host": self._host,
            "scheduler.targets": self["scheduler"].address,
            "scheduler.route-timeout-s": 2.0,
            "model.path": MODEL_FOLDER,
            "model.served-name": MODEL,
            "limits.ttft-deadline-ms": int(1e3 * self._limits.ttft_s),
        }
        self._service("gateway", gateway, sticky=True)
        for child in self.children.values():
            await child.ready()
        await self.all_known()

    def start_worker(self, name: str) -> None:
        """Starts a worker; its name says which kind."""
        kind, fleet, link = name.partition("-")[0], self._fleet, self._link
        flags: dict[str, object] = {
            "worker.id": name,
            "worker.scheduler-targets": self["scheduler"].address,
            "worker.kvmanager-target": self["kvmanager"].address,
            "worker.prefill-slots": fleet.slots,
            "engine.kind": "fake",
            "engine.model": MODEL_FOLDER,
            "engine.model-name": MODEL,
            "engine.block-size": BLOCK_SIZE,
            "engine.num-blocks": fleet.num_tokens // BLOCK_SIZE,
            "engine.max-batch-tokens": CHUNK_TOKENS,
            "engine.fake-profile": self._profile,
            "engine.fake-device": fleet.devices[kind],
            "engine.fake-token-bytes": fleet.token_bytes,
            **fleet.flags,
        }
        prefix: tuple[str, ...] = ()
        if kind == "remote":
            assert link is not None, "a far cluster is behind a link"
            flags |= {"worker.cluster": FAR, "worker.channels": "tcp", "server.host": link.far}
            prefix = link.prefix
        service = "decode" if kind == "decode" else "prefill"
        self._service(name, flags, service=service, prefix=prefix)

    async def use_scheduler(self, flags: Flags) -> None:
        """Goes on with a scheduler of other flags; everybody finds it again."""
        child = self["scheduler"]
        child.signal(signal.SIGTERM)
        assert await child.exit_code() == 0, "the scheduler stops in order"
        child.flags.update(flags)
        await self.restart("scheduler")
        await self.all_known()

    async def load(self, system: str, load: Sequence[Arrival], seed: int) -> tuple[Row, list[Seen]]:
        """Sends a load, waits until nothing is held, and says what was seen."""
        say(f"  {system}: {len(load)} requests in {load[-1].at_s:.0f} s")
        before = await self._egress()
        seen = await send(self.url, load, seed)
        await self.idle()
        row = live_row(system, seen, self._limits)
        row["egress MB"] = round((await self._egress() - before) / 1e6, 1)
        return row, seen

    async def _egress(self) -> float:
        """KV bytes that left the far cluster, or any worker where there is none."""
        wanted = "remote" if "remote" in self._fleet.workers else ""
        total = 0.0
        for worker in self.workers:
            if worker.name.startswith(wanted):
                metrics = await worker.metrics()
                total += metrics.value("kvmesh_link_bytes_total", direction="sent")
        return total

    async def fleet_decisions(self) -> list[dict[str, Any]]:
        """What the loops above single requests decided, the newest last."""
        url = f"http://{self['scheduler'].address_of('admin_serving')}/debug/decisions"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            response.raise_for_status()
            body: dict[str, list[dict[str, Any]]] = await response.json()
            return body["fleet"][::-1]

    async def gateway_metrics(self) -> Metrics:
        """What the gateway's metrics are now."""
        return await scrape(f"{self.url}/metrics")

    async def threshold(self) -> float:
        """Uncached tokens above which prompts go to the far cluster; 0 where none do."""
        metrics = await self["scheduler"].metrics()
        found = metrics.value("kvmesh_scheduler_threshold_tokens")
        return found if math.isfinite(found) else 0.0

    async def roles(self) -> tuple[int, int]:
        """Workers that prefill and that decode, as routes use them now."""
        metrics = await self["scheduler"].metrics()
        found = [metrics.value("kvmesh_scheduler_workers", role=r) for r in ("prefill", "decode")]
        return int(found[0]), int(found[1])

    async def roles_are(self, num_prefill: int) -> None:
        """Waits until so many workers prefill."""

        async def fact() -> bool:
            return (await self.roles())[0] == num_prefill

        await until(fact, f"{num_prefill} workers prefill", READY_S)


@asynccontextmanager
async def live_mesh(
    fleet: Fleet,
    profile: Path,
    limits: Limits,
    scheduler: Flags,
    *,
    kvmanager: Flags | None = None,
    link: FarLink | None = None,
) -> AsyncIterator[LiveMesh]:
    """A mesh that serves; at the end all must stop with exit code 0 and without errors."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-live-")))
        mesh = LiveMesh(folder, fleet, profile, limits, link)
        mesh.redis = stack.enter_context(redis_process(folder))
        stack.callback(mesh.reap)
        began = time.perf_counter()
        await mesh.bring_up(scheduler, kvmanager or {})
        say(f"  {len(mesh.children)} processes up in {time.perf_counter() - began:.0f} s")
        yield mesh
        await mesh.idle()
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes
        assert mesh.failures() == [], mesh.failures()


def say(text: str) -> None:
    """Progress for people."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
