"""Both time scales over two clusters, through router and planner: what a shift of the prompts'
lengths makes of the threshold and of the split, and of the routes of requests that follow.
"""

from __future__ import annotations

import random

import pytest

from kvmesh.core.types import Role, RouteCause
from kvmesh.policy.allocation_loop import MIN_LENGTHS
from services.scheduler.config import PlanningConfig
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.test_planner import DECODES, IDLE, TOTALS, Mesh

PLANNING = PlanningConfig(remote_cluster="west", egress_mb_s=1000.0, threshold_tokens=1000)
FAR_TOKEN_S, NEAR_TOKEN_S = 1e-3, 2e-3
MANY = 3 * MIN_LENGTHS


def two_clusters() -> Mesh:
    mesh = Mesh(planning=PLANNING, policy="prfaas")
    mesh.join(worker_info("far", cluster="west"))
    mesh.join(*(worker_info(f"p{n}") for n in range(2)))
    mesh.join(*(worker_info(f"d{n}", Role.DECODE) for n in range(4)))
    return mesh


class Load:
    """What workers of known speeds report while prompts come."""

    def __init__(self, mesh: Mesh, seed: int = 1) -> None:
        self._mesh = mesh
        self._draw = random.Random(seed)
        self._num_routes = self._seconds = 0

    async def prompts(self, low: int, high: int, count: int = MANY) -> None:
        """So many of evenly spread lengths."""
        for _ in range(count):
            await self._route(self._draw.randint(low, high))

    async def seconds(self, count: int = 10) -> None:
        """All are at work, and requests wait for prefill."""
        for _ in range(count):
            self._seconds += 1
            for name, token_s in (("far", FAR_TOKEN_S), ("p0", NEAR_TOKEN_S), ("p1", NEAR_TOKEN_S)):
                computed = int(self._seconds / token_s)
                self._mesh.report(name, prefill_tokens_total=computed, compute_used=1.0, **IDLE)
            made = 400 * self._seconds
            for number in range(4):
                self._mesh.report(
                    f"d{number}", **IDLE, **{**DECODES, **dict.fromkeys(TOTALS, made)}
                )
            self._mesh.clock.advance(0.9)
            await self._route(1000, waiting=4, waiting_reserved=4)
            self._mesh.clock.advance(0.1)
            await self._mesh.planner.cycle(may_order=False)

    async def _route(self, num_tokens: int, **changes: int) -> None:
        self._num_routes += 1
        await self._mesh.route(f"r{self._num_routes}", num_tokens, max_new_tokens=2, **changes)


async def cause(mesh: Mesh, num_tokens: int) -> RouteCause:
    return (await mesh.route(f"asked {num_tokens}", num_tokens)).cause


async def test_the_slow_scale_moves_threshold_and_split_with_the_lengths() -> None:
    mesh = two_clusters()
    load = Load(mesh)
    await load.prompts(100, 1900)
    await load.seconds()
    await mesh.planner.reallocate(may_order=True)
    short = mesh.planner.offload("m").threshold_tokens
    assert 700 < short < 1900, "one far worker is as fast as both at home, and gets the longer half"
    assert mesh.orders[0][1] == "prefill", "next to nothing is generated"
    assert await cause(mesh, 1900) is RouteCause.LONG_PROMPT
    assert await cause(mesh, 400) is not RouteCause.LONG_PROMPT

    await load.prompts(1500, 4000)
    await load.seconds()
    await mesh.planner.reallocate(may_order=True)
    long = mesh.planner.offload("m").threshold_tokens
    assert long > 1.5 * short
    assert await cause(mesh, 1900) is not RouteCause.LONG_PROMPT
    assert await cause(mesh, 4000) is RouteCause.LONG_PROMPT
    assert {each["outcome"] for each in mesh.fleet_log("reallocation")} == {"applied"}


async def test_both_scales_the_fast_one_goes_on_from_what_the_slow_one_found() -> None:
    mesh = two_clusters()
    load = Load(mesh)
    await load.prompts(100, 1900, MIN_LENGTHS)
    await load.seconds()
    mesh.report("far", **IDLE, sent_bytes_total=0)
    for second in range(1, 4):
        mesh.report("far", **IDLE, sent_bytes_total=990_000_000 * second)
        await mesh.second()
    raised = mesh.planner.offload("m").threshold_tokens
    assert raised == pytest.approx(1000 * 1.15**3)
    await mesh.planner.reallocate(may_order=False)
    carried = mesh.planner.offload("m").threshold_tokens
    for _ in range(30):
        await mesh.second()
    base = mesh.planner.offload("m").threshold_tokens
    assert carried == pytest.approx(base * 1.15**3), "the link is as full as it was"
    assert base != 1000, "it returns to the new place, not to the old one"
