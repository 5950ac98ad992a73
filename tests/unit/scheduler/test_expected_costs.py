"""Costs of a model that the scheduler is told before its workers have shown them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmesh.core.details import FleetWorker, WorkerDetail
from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, WorkerLoad
from kvmesh.policy.allocation_loop import MIN_LENGTHS
from kvmesh.sim.cost_fit import DecodeSample, PrefillSample
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.profile_record import Measured, profile_record
from tests.unit.policy.fleet_examples import query, worker_info
from tests.unit.scheduler.parts import Parts

PROMPT_TOKEN_S = 2e-3
WORKERS = [
    FleetWorker(worker_info(name, role), WorkerLoad(blocks_free=512), WorkerDetail())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE))
]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """As `kvmesh profile` writes it for a model that is served as "m"."""
    lengths = (64, 256, 1024)
    measured = Measured(
        model="m",
        device="cpu",
        prefill=tuple(PrefillSample(each, 0, PROMPT_TOKEN_S * each) for each in lengths),
        decode=tuple(DecodeSample(each, 64, 0.01 + 0.001 * each) for each in (1, 2, 4)),
        kv_bytes={"total": [(16, 1000), (32, 2000)]},
        kv_tokens=8192,
        link_bytes_per_s=1e9,
        memory_bytes_per_s=1e10,
    )
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_record(measured)))
    return str(file)


def test_splits_are_planned_and_fetches_priced_before_anything_is_measured(profile: str) -> None:
    parts = Parts()
    parts.planner.profile = load_profile(profile)
    for model in ("m", "another"):
        loops = parts.planner._loops(model)
        for _ in range(MIN_LENGTHS):
            loops.note_prompt(query(1000), 1000)
        at_once(loops.observe(WORKERS, WORKERS, parts.planner.demand.current(model, 0.0), 0, 1.0))
        question = loops.question(WORKERS)
        if model == "another":
            assert question is None
            assert loops.pace.token_s == 0.0
            continue
        assert question is not None
        assert question.serving.local_prefill_s(1000) == pytest.approx(1000 * PROMPT_TOKEN_S)
        assert loops.pace.token_s == pytest.approx(PROMPT_TOKEN_S)
