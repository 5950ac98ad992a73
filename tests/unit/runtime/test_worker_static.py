from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import load_runner
from kvmesh.runtime.worker_static import static_batch_of
from tests.unit.engine.tiny_checkpoint import write_checkpoint


@pytest.mark.parametrize(
    ("device", "word", "batch"),
    [
        ("cpu", "auto", 0),
        ("cuda:1", "auto", 24),
        ("cpu", "on", 24),
        ("cuda", "on", 24),
        ("cuda", "off", 0),
    ],
)
def test_when_steps_are_static(device: str, word: str, batch: int) -> None:
    config = EngineSection(device=device, cuda_graphs=word, max_graph_batch=24)
    assert static_batch_of(config) == batch


def test_a_word_that_means_nothing() -> None:
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs must be auto, on or off"):
        static_batch_of(EngineSection(cuda_graphs="yes"))


@pytest.mark.parametrize(("word", "buckets"), [("on", (1, 2, 3)), ("auto", ())])
def test_a_workers_runner_does_as_told(tmp_path: Path, word: str, buckets: tuple[int, ...]) -> None:
    model = str(write_checkpoint(tmp_path))
    config = EngineSection(model=model, num_blocks=8, cuda_graphs=word, max_graph_batch=3)
    runner = load_runner(config)
    assert isinstance(runner, TorchRunner)
    assert (runner._static.buckets if runner._static is not None else ()) == buckets
    runner.close()


@pytest.mark.parametrize(("device", "num_steps"), [("cpu", 1), ("cuda", 8)])
def test_a_device_computes_steps_before_there_are_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, num_steps: int
) -> None:
    load = TorchRunner.load
    steps: list[list[SequenceChunk]] = []

    def execute(runner: TorchRunner, chunks: list[SequenceChunk]) -> None:
        assert runner._static is None, "these are the other steps"
        steps.append(chunks)

    monkeypatch.setattr(
        TorchRunner, "load", lambda folder, **given: load(folder, **(given | {"device": "cpu"}))
    )
    monkeypatch.setattr(TorchRunner, "execute", execute)
    monkeypatch.setattr("kvmesh.runtime.worker_runner.require_named_device", lambda _device: None)
    model = str(write_checkpoint(tmp_path))
    config = EngineSection(
        model=model, device=device, num_blocks=8, cuda_graphs="on", max_batch_tokens=70
    )
    load_runner(config)
    assert len(steps) == num_steps
    assert all(sum(chunk.end - chunk.start for chunk in step) <= 70 for step in steps)
