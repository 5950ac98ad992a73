"""Workers and queries for policy tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvmesh.core.types import (
    Endpoint,
    KvLayout,
    RequestId,
    Role,
    RouteQuery,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.policy.ranking import CACHE_LOAD, KVMESH, LEAST_LOADED, PDSERVE, ROUND_ROBIN
from kvmesh.policy.view import FleetView, WorkerView

NOW = 100.0

LAYOUT = KvLayout("fingerprint", "float32", 16, 2, 2, 32)

POLICIES = {each.name: each for each in (KVMESH, CACHE_LOAD, LEAST_LOADED, PDSERVE, ROUND_ROBIN)}
"""Ours, by name; those of other systems are in `policy/baselines.py`."""


def worker_info(name: str, role: Role = Role.PREFILL, **changes: Any) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=WorkerId(name),
        incarnation=1,
        role=role,
        cluster="east",
        control_endpoint=Endpoint("127.0.0.1", 5000),
        data_endpoint=Endpoint("127.0.0.1", 6000),
        model="m",
        layout=LAYOUT,
        max_model_len=4096,
        prefill_slots=4,
        decode_slots=8,
        num_blocks=512,
    )
    return dataclasses.replace(info, **changes)


def worker(
    name: str, role: Role = Role.PREFILL, *, reported_at: float = NOW, **changes: Any
) -> WorkerView:
    """A worker; keyword arguments go to its load, its in-flight counts or else its info."""
    load_names = {field.name for field in dataclasses.fields(WorkerLoad)}
    flight = {key: changes.pop(key) for key in tuple(changes) if key.endswith("_in_flight")}
    load = {key: changes.pop(key) for key in tuple(changes) if key in load_names}
    info = worker_info(name, role, **changes)
    load.setdefault("blocks_free", info.num_blocks)
    return WorkerView(info, WorkerLoad(**load), reported_at, **flight)


def fleet(*workers: WorkerView, num_routes: int = 0) -> FleetView:
    return FleetView(workers, version=1, num_routes=num_routes)


def query(num_tokens: int = 320, **changes: Any) -> RouteQuery:
    asked = RouteQuery(RequestId("r"), "m", num_tokens, max_new_tokens=32)
    if "avoid" in changes:
        changes["avoid"] = frozenset(WorkerId(name) for name in changes["avoid"])
    return dataclasses.replace(asked, **changes)
