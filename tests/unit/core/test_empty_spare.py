from __future__ import annotations

import dataclasses

import pytest

from kvmesh.core.empty_spare import Assignment, EmptySpare, Origin
from kvmesh.core.types import Role, WorkerId, WorkerInfo
from tests.unit.policy.fleet_examples import LAYOUT, worker_info

SPARE = EmptySpare(WorkerId("e"), 1, "east", "kvmesh")
LOST = worker_info("d", Role.DECODE, scenario="doc", origin=Origin("/models/m", 9.0, 2.0))


def test_an_assignment_names_what_makes_a_worker_like_another() -> None:
    made = Assignment.like(LOST, "why")
    assert (made.role, made.scenario, made.model) == (Role.DECODE, "doc", "m")
    assert (made.checkpoint, made.dtype, made.block_size) == ("/models/m", "float32", 16)
    assert (made.max_model_len, made.group_checkpoint, made.reason) == (4096, None, "why")


@pytest.mark.parametrize(
    "info",
    [
        dataclasses.replace(LOST, cluster="west"),
        dataclasses.replace(LOST, layout=dataclasses.replace(LAYOUT, engine="vllm")),
        dataclasses.replace(LOST, layout=dataclasses.replace(LAYOUT, dtype="float8_e4m3fn")),
        dataclasses.replace(LOST, adapters=("a",)),
        dataclasses.replace(LOST, origin=Origin()),
    ],
)
def test_a_spare_cannot_be_like_every_worker(info: WorkerInfo) -> None:
    assert SPARE.can_be_like(LOST)
    assert not SPARE.can_be_like(info)


def test_a_spare_that_loads_a_model_loads_no_other() -> None:
    loading = dataclasses.replace(SPARE, assignment=Assignment.like(LOST, ""))
    assert not loading.is_waiting
    assert not loading.can_be_like(LOST)
