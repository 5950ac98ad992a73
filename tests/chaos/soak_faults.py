"""What the soak does to a mesh: one fault after the other, each repaired before the next."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.mesh_processes import Mesh

_WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# A worker that does not answer for longer is lost; shorter pauses go unnoticed.
_LONGEST_PAUSE_S = 12.0


@dataclass
class Faults:
    """Random faults.

    Attributes:
        done: by kind.
    """

    mesh: Mesh
    draw: random.Random
    done: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float) -> None:
        """Breaks and repairs for so long; at the end all runs."""
        deadline = time.monotonic() + seconds
        kinds = {
            self._kill_worker: 4,
            self._pause_worker: 4,
            self._drain_worker: 2,
            self._kill_control: 1,
            self._pause_control: 1,
            self._kill_redis: 1,
        }
        while time.monotonic() < deadline:
            await asyncio.sleep(self.draw.uniform(0.2, 3.0))
            (fault,) = self.draw.choices(list(kinds), list(kinds.values()))
            self.done[fault.__name__.strip("_")] += 1
            await fault()

    async def _kill_worker(self) -> None:
        name = self.draw.choice(_WORKERS)
        self.mesh[name].kill()
        await asyncio.sleep(self.draw.uniform(0.0, 2.0))
        await self.mesh.restart(name)

    async def _drain_worker(self) -> None:
        name = self.draw.choice(_WORKERS)
        child = self.mesh[name]
        child.signal(signal.SIGTERM)
        code = await child.exit_code()
        assert code == 0, f"{name} drained with {code}"
        await self.mesh.restart(name)

    async def _pause_worker(self) -> None:
        await self._pause(self.draw.choice(_WORKERS), _LONGEST_PAUSE_S)

    async def _pause_control(self) -> None:
        await self._pause(self.draw.choice(("scheduler", "kvmanager")), 3.0)

    async def _pause(self, name: str, longest_s: float) -> None:
        child = self.mesh[name]
        child.signal(signal.SIGSTOP)
        await asyncio.sleep(self.draw.uniform(0.05, longest_s))
        child.signal(signal.SIGCONT)

    async def _kill_control(self) -> None:
        name = self.draw.choice(("scheduler", "kvmanager"))
        self.mesh[name].kill()
        await asyncio.sleep(self.draw.uniform(0.0, 1.0))
        await self.mesh.restart(name)

    async def _kill_redis(self) -> None:
        assert self.mesh.redis is not None
        self.mesh.redis.stop(kill=True)
        await asyncio.sleep(self.draw.uniform(0.0, 1.0))
        self.mesh.redis.start()
