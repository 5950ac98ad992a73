from __future__ import annotations

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import WorkerId
from kvmesh.engine.copier import InlineCopier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.runtime.worker_config import OutsideSection, TiersSection
from kvmesh.runtime.worker_tiers import TierParts, make_outside, make_tiers


@pytest.mark.parametrize(("gib", "num_places"), [(0.0, None), (1e-6, 8), (1e-8, -1), (-1.0, -1)])
def test_host_memory_holds_as_many_blocks_as_fit(gib: float, num_places: int | None) -> None:
    runner = FakeRunner()  # blocks of 128 bytes
    core = EngineCore(runner.spec, 4)

    def make() -> int | None:
        inline = InlineCopier()
        parts = TierParts(
            WorkerId("w"), core, runner, PromptTime(64), ManualClock(), inline, inline
        )
        tiers = make_tiers(TiersSection(gib), parts)
        return None if tiers is None else tiers.statistics()[0].num_places

    if num_places == -1:
        with pytest.raises(ConfigError, match="give more, or 0"):
            make()
    else:
        assert make() == num_places


async def test_a_store_outside_needs_host_memory_and_a_url_that_can_be_read() -> None:
    runner, inline = FakeRunner(), InlineCopier()
    core = EngineCore(runner.spec, 4)
    parts = TierParts(WorkerId("w"), core, runner, PromptTime(64), ManualClock(), inline, inline)
    assert make_outside(OutsideSection(), runner.spec) is None
    outside = make_outside(OutsideSection("redis://127.0.0.1:1/0"), runner.spec)
    assert outside is not None
    with pytest.raises(ConfigError, match=r"needs tiers\.host_gib"):
        make_tiers(TiersSection(), parts, outside)
    await outside.close()
    with pytest.raises(ConfigError, match="url"):
        make_outside(OutsideSection("127.0.0.1:6379"), runner.spec)
