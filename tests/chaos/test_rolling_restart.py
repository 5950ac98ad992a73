"""Everything is restarted, in any order, while requests run, and nobody notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rolling import EVERYTHING, any_order, restarts, rolling_mesh

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_everything_is_restarted_under_streams(tmp_path: Path, seed: int) -> None:
    async with rolling_mesh(tmp_path) as mesh:
        found, wrong = await restarts(mesh, any_order(seed), seed)
        assert wrong == []
    for each in found:
        print(each)
    assert {each.name for each in found} == set(EVERYTHING)
    assert sum(each.streams for each in found) >= len(found), "streams came and went meanwhile"
