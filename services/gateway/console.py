"""Serves the console, this gateway's view of the mesh, on the admin port.

Tests: tests/integration/test_console.py, tests/e2e/test_gateway_processes.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from kvmesh.console.page import INTERVAL_S, ConsolePage, Requests
from kvmesh.console.sampler import Sampler
from kvmesh.console.share import Share
from kvmesh.console.snapshot import ConsoleView
from kvmesh.rpc.channels import MeshAccess
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.runtime.admin import AdminPort


@dataclass(frozen=True, slots=True)
class ConsoleSources:
    """The console's sources of data.

    Attributes:
        models: names of the models that the gateway serves.
    """

    models: Sequence[str]
    schedulers: Sequence[str]
    access: MeshAccess
    requests: Requests


def add_console(admin: AdminPort, sources: ConsoleSources) -> dict[str, Coroutine[Any, Any, None]]:
    """Adds the console's routes. Returns the background tasks that it needs, by name."""
    # A second fleet view, with details, which are too large for the view that requests use.
    fleet = FleetWatch(sources.schedulers, sources.access, "console", with_detail=True)
    sampler = Sampler()

    def view(share: Share) -> ConsoleView:
        return ConsoleView(
            time.time(),
            ", ".join(sources.models),
            version("kvmesh"),
            fleet.fresh,
            fleet.workers,
            share,
            sampler,
            fleet.kvmanager_connected,
        )

    async def sample() -> None:
        while True:
            thresholds = {each.model: each.threshold_tokens for each in fleet.models}
            share = await sources.requests.share(with_rows=False)
            threshold = thresholds.get(sources.models[0])
            sampler.take(fleet.workers, share, time.time(), threshold, fresh=fleet.fresh)
            await asyncio.sleep(INTERVAL_S)

    ConsolePage(sources.requests, view).add_to(admin)
    return {"console fleet watch": fleet.run(), "console samples": sample()}
