"""Puts the console on the gateway's admin port: what this gateway sees of the mesh.

Tests: tests/integration/test_console.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from kvmesh.console.page import INTERVAL_S, ConsolePage
from kvmesh.console.request_log import RequestLog
from kvmesh.console.sampler import Sampler, Totals
from kvmesh.console.snapshot import ConsoleView
from kvmesh.rpc.channels import TlsConfig
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.runtime.app import ServiceContext
from services.gateway.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class ConsoleSources:
    """What the console reads."""

    model: str
    schedulers: Sequence[str]
    tls: TlsConfig
    metrics: GatewayMetrics
    log: RequestLog


def add_console(context: ServiceContext, sources: ConsoleSources) -> None:
    """Adds the routes and the task that samples the mesh."""
    # Not the gateway's own view of the fleet: details are many bytes that no request needs.
    fleet = FleetWatch(sources.schedulers, sources.tls, "console", with_detail=True)
    sampler = Sampler(sources.log)
    loop = asyncio.get_running_loop()

    def view() -> ConsoleView:
        return ConsoleView(
            sources.model,
            version("kvmesh"),
            fleet.fresh,
            fleet.workers,
            sources.metrics.refusals(),
            sources.log,
            sampler,
        )

    async def sample() -> None:
        while True:
            thresholds = {each.model: each.threshold_tokens for each in fleet.models}
            totals = Totals(sources.metrics.refusals(), thresholds.get(sources.model))
            sampler.take(fleet.workers, totals, loop.time())
            await asyncio.sleep(INTERVAL_S)

    ConsolePage(view, loop.time).add_to(context.admin)
    context.spawn(fleet.run(), "console fleet watch")
    context.spawn(sample(), "console samples")
