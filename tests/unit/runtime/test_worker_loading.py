from __future__ import annotations

import time

import psutil
import pytest

from kvmesh.core.empty_spare import Assignment
from kvmesh.core.types import Role
from kvmesh.runtime.empty_spare import assigned
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_loading import Loading

ASSIGNMENT = Assignment(Role.DECODE, "chat", "m", "/m", "float32", 32, 999)


def test_the_time_for_which_an_empty_spare_waited_is_no_part_of_its_start() -> None:
    found = Loading(1000.0, 2.0, ASSIGNMENT).origin("/m", 1000.5)
    assert (found.start_s, found.load_s) == (2.5, 0.5)
    assert (found.checkpoint, found.assignment) == ("/m", ASSIGNMENT)


def test_a_worker_with_its_model_starts_with_its_process() -> None:
    began = psutil.Process().create_time()
    found = Loading(time.time()).origin("/m", time.time())
    assert found.start_s == pytest.approx(time.time() - began, abs=0.5)
    assert found.load_s == pytest.approx(0.0, abs=0.5)
    assert found.assignment is None


def test_an_assignment_leaves_what_is_the_machines_own() -> None:
    config = WorkerConfig(
        worker=WorkerSection(id="e", role="spare", cluster="west"),
        engine=EngineSection(kind="fake", num_blocks=77, num_threads=3),
    )
    made = assigned(config, ASSIGNMENT)
    assert (made.worker.id, made.worker.cluster) == ("e", "west")
    assert (made.worker.role, made.worker.scenario) == ("decode", "chat")
    engine = made.engine
    assert (engine.kind, engine.num_blocks, engine.num_threads) == ("fake", 77, 3)
    assert (engine.model, engine.model_name, engine.dtype) == ("/m", "m", "float32")
    assert (engine.block_size, engine.max_model_len) == (32, 999)
