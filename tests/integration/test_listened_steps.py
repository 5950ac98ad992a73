"""A step that tells of its stages computes what a silent one does, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.types import SamplingParams
from kvmesh.engine.families import FAMILIES
from kvmesh.engine.protocol import SequenceChunk, StepResult
from kvmesh.engine.runner import TorchRunner
from tests.engine_alone import generated
from tests.integration.kinds import model_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [
    [step * position % 300 for position in range(length)] for step, length in ((7, 40), (11, 23))
]
STEP_TOKENS = 16


class Listened:
    """A runner whose steps each have a listener; `heard` are the numbers of each step."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.heard: list[list[int]] = []

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        self.heard.append([])
        told = self.heard[-1].append
        return self._runner.execute([replace(chunks[0], on_layers=told), *chunks[1:]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_tokens_are_the_same_and_all_stages_are_heard(kind: str, tmp_path: Path) -> None:
    model_of(kind).save_pretrained(tmp_path)
    runner = TorchRunner.load(tmp_path, served_name="tiny", dtype="float32", num_blocks=64)
    silent = generated(runner, PROMPTS, GREEDY, max_tokens=STEP_TOKENS)
    listened = Listened(runner)
    assert generated(listened, PROMPTS, GREEDY, max_tokens=STEP_TOKENS) == silent
    for heard in listened.heard[:4]:  # the prompts' steps
        assert heard == sorted({*heard})
        assert heard[-1] == len(runner.spec.stages)
    runner.close()
