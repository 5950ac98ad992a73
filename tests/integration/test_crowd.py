"""Engines that are short of blocks say what an engine alone says, to the last log-probability."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.crowd import TOLERANCE, run_crowd
from tests.integration.crowd_engines import ALL_GROUPS, load

NUM_REQUESTS = 12
# Seeds for which all of it happens, or the test would show less than it says.
SEEDS = {ALL_GROUPS: 2, "qwen3.5": 5, "kimi-linear": 5, "minimax": 5, "gemma3": 1}
HAPPENS = ("preempted", "swapped in", "tokens found cached", "handed over", "moved")


@pytest.mark.parametrize("family", SEEDS)
def test_a_crowd_gets_what_each_would_get_alone(family: str, tmp_path: Path) -> None:
    outcome = run_crowd(load(family, tmp_path), SEEDS[family], NUM_REQUESTS)
    assert outcome.worst < TOLERANCE
    assert not [each for each in HAPPENS if not outcome.seen[each]]
