from __future__ import annotations

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_static import static_batch_of


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineSection(cuda_graphs="yes"), "engine.cuda_graphs must be auto, on or off"),
        (EngineSection(max_graph_batch=0), "engine.max_graph_batch must be at least 1"),
    ],
)
def test_words_and_sizes_that_mean_nothing(config: EngineSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        static_batch_of(config)
