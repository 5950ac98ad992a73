from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import ConfigError
from kvmesh.engine.copier import InlineCopier
from kvmesh.engine.fake import FakeRunner
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_swap import make_swap_space


@pytest.mark.parametrize(
    ("device", "swap_gib", "has_space"),
    [("cpu", -1.0, False), ("cuda", -1.0, True), ("cuda", 0.0, False), ("cpu", 0.001, True)],
)
def test_when_there_is_one(device: str, swap_gib: float, has_space: bool) -> None:
    config = EngineSection(device=device, swap_gib=swap_gib)
    space = make_swap_space(
        config, FakeRunner(num_blocks=4), PromptTime(64), ManualClock(), InlineCopier()
    )
    assert (space is not None) is has_space


@pytest.mark.parametrize("swap_gib", [-2.0, 1e-9])
def test_a_size_without_a_block_is_refused(swap_gib: float) -> None:
    config = replace(EngineSection(), swap_gib=swap_gib)
    with pytest.raises(ConfigError, match=r"engine\.swap_gib"):
        make_swap_space(
            config, FakeRunner(num_blocks=4), PromptTime(64), ManualClock(), InlineCopier()
        )
