"""Small fleets and requests for simulator tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvmesh.policy.curves import Quadratic
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile import DecodeCost, Device, Links, Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

DEVICE = Device("d", Quadratic(0.0, 0.001), DecodeCost(0.01, 0.0, 0.0), 64, 2, 4)
"""1 ms per prompt token, 10 ms per decode step, 64 blocks."""

PROFILE = dataclasses.replace(
    load_profile("flowkv"),
    kv_bytes=Quadratic(0.0, 1000.0),
    devices={"d": DEVICE},
    # One block of KV takes 5.12 ms inside a cluster and 51.2 ms between.
    links=Links(1e8, 1e7, 0.0),
)


def profile(**changes: Any) -> Profile:
    device = dataclasses.replace(DEVICE, **changes)
    plan = dataclasses.replace(PROFILE.plan, remote="d", local="d")
    return dataclasses.replace(PROFILE, devices={"d": device}, plan=plan)


def trace(
    at: float = 0.0, blocks: int = 2, output: int = 3, first_id: int = 0, **changes: Any
) -> TraceRequest:
    """A prompt of whole blocks and one token more; equal `first_id` is an equal prompt."""
    tokens = blocks * TRACE_BLOCK + 1
    ids = (*range(first_id, first_id + blocks), 10**6 + first_id)
    return TraceRequest(at, tokens, output, ids, **changes)


def request(index: int = 0, **changes: Any) -> SimRequest:
    return SimRequest.from_trace(index, trace(**changes), 0.0, 30.0)


def scenario(
    *requests: TraceRequest,
    fleet: str = "home:d:prefill:1,home:d:decode:1",
    system: str = "cache_load",
    device: dict[str, Any] | None = None,
    **changes: Any,
) -> Scenario:
    changes.setdefault("jitter", 0.0)
    return Scenario(
        profile(**(device or {})), parse_fleet(fleet), SYSTEMS[system], requests, **changes
    )
