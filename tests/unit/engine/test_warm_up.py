"""Steps before the first request: they fit the engine, and leave nothing that a request sees."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import SamplingParams
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.warm_up import first_step, warm_up
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import load_runner
from tests.unit.engine.tiny_checkpoint import write_checkpoint


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "longest"),
    # With two token groups and a state in two blocks, four are left for each group of ten.
    [(500, 512, 512), (10, 512, 64), (500, 1, 1), (2000, 1 << 30, 8192)],
)
def test_prompts_of_all_sizes_and_decode_rows(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_tokens: int, longest: int
) -> None:
    runner = FakeRunner(num_blocks=num_blocks, groups=KvGroups((0, 32), state_blocks=2))
    execute, seen = runner.execute, []

    def watched(chunks: list[SequenceChunk]) -> object:
        seen.append([(chunk.start, chunk.end) for chunk in chunks])
        return execute(chunks)

    monkeypatch.setattr(runner, "execute", watched)
    warm_up(runner, max_tokens)
    spans = [span for (span,) in seen]
    *prompts, short, far = spans
    context = min(8192, (num_blocks - 2) // 2 * 16)
    assert prompts[0] == (0, longest)
    assert all(here[1] // 2 == after[1] for here, after in itertools.pairwise(prompts))
    assert prompts[-1] == (0, min(2, longest))
    assert short == (prompts[-1][1] - 1, prompts[-1][1])
    assert far == (context - 1, context)


def test_requests_get_the_same_tokens_after_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    prompt = SequenceChunk(
        1, list(range(10, 21)), 0, 11, [1, 0, 2], 11, SamplingParams(seed=3), sample=True
    )
    found = []
    for warm in (False, True):
        runner = TorchRunner.load(folder, served_name="tiny", num_blocks=8, block_size=4)
        if warm:
            warm_up(runner, 512)
        found.append(runner.execute([prompt]).tokens[0])
        runner.close()
    assert found[0] == found[1]
    assert found[0] is not None


def test_a_pool_without_room_computes_nothing() -> None:
    runner = FakeRunner(num_blocks=3, groups=KvGroups((0, 32), state_blocks=2))
    assert EngineCore(runner.spec, 3).max_model_len == 0
    warm_up(runner, 512)
    first_step(runner)


@pytest.mark.parametrize("kind", ["fake", "kvmesh"])
def test_an_engine_computes_before_its_worker_can_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    runner_type, seen = FakeRunner if kind == "fake" else TorchRunner, list[tuple[int, int]]()
    execute = runner_type.execute

    def watched(runner: Any, chunks: list[SequenceChunk]) -> object:
        seen.extend((chunk.start, chunk.end) for chunk in chunks)
        return execute(runner, chunks)

    monkeypatch.setattr(runner_type, "execute", watched)
    folder = write_checkpoint(tmp_path)
    load_runner(EngineSection(kind=kind, model=str(folder), num_blocks=8)).close()
    assert seen == [(0, 1)]
