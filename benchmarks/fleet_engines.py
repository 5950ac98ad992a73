"""Engines of the workers in the fleet's benchmark, and the tokens that their answers must have.

Workers are processes on one machine. A fake engine sleeps for the time of a step. KVMesh's own
engine computes the step and sleeps for what is left of the same time, so that workers do not wait
for each other's cores, which they would not share in a fleet of machines.
Tests: tests/unit/benchmarks/test_fleet.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file

from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.protocol import ModelRunner
from kvmesh.kv.hashing import root_hash
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import load_runner
from tests.e2e.local_stack import another_checkpoint, faulty
from tests.mesh_processes import BLOCK_SIZE, MODEL, MODEL_FOLDER
from tests.one_engine import tokens_of

STEP_S = 0.02
"""Of a stack whose part names none."""

DTYPE = "float32"
"""In which tokens do not depend on who is in the same step."""

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """Attributes:
    kind: `fake` or `kvmesh`, as in `engine.kind`.
    """

    kind: str
    _alone: dict[Path, ModelRunner] = field(default_factory=dict, compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        """For `kvmesh up`."""
        return ("--engine", self.kind, "--dtype", DTYPE)

    def prepare(self, folder: Path, step_s: float, *ill: str) -> dict[str, str]:
        """Makes engines of a stack that is started with this folder last `step_s` per step.

        Args:
            ill: workers that can be made ill.

        Returns:
            More of the stack's environment.
        """
        is_fake = self.kind == "fake"
        faulty(folder, *ill, kind=self.kind, step_s=0.0 if is_fake else step_s)
        return {"KVMESH_ENGINE__FAKE_STEP_S": str(step_s)}

    def another_checkpoint(self, folder: Path) -> Path:
        """The model with the same tokenizer and other weights; a fake takes fewer tokens for it."""
        if self.kind == "fake":
            return another_checkpoint(folder)
        shutil.copytree(MODEL_FOLDER, folder)
        weights = load_file(folder / WEIGHTS)
        weights["model.norm.weight"] = weights["model.norm.weight"].flip(0).contiguous()
        save_file(weights, folder / WEIGHTS)
        return folder

    def tokens(
        self, prompt: Sequence[int], count: int, seed: int, folder: Path = MODEL_FOLDER
    ) -> list[int]:
        """Tokens of a single engine at temperature 1, which end tokens do not stop."""
        if folder not in self._alone:
            section = EngineSection(
                kind=self.kind,
                dtype=DTYPE,
                model=str(folder),
                model_name=MODEL,
                num_blocks=1024,
                block_size=BLOCK_SIZE,
                num_threads=1,
            )
            self._alone[folder] = load_runner(section)
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=count, ignore_eos=True)
        spec = SequenceSpec(tuple(prompt), len(prompt), sampling, root_hash("reference"))
        return tokens_of(self._alone[folder], spec)


ENGINES = {kind: FleetEngine(kind) for kind in ("fake", "kvmesh")}
