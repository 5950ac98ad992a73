"""What a worker's decode side has to offer to requests that limit their time per token."""

from __future__ import annotations

import math
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import Role
from kvmesh.policy.mixed_step import KEPT_SHARE
from kvmesh.policy.step_rules import StepRules
from kvmesh.policy.token_pace import BEARABLE_MISSES
from kvmesh.runtime.decode_pace import DecodePace
from kvmesh.runtime.decode_task import DecodeTask


def task(
    num_prompt: int, num_generated: int, limit_s: float, since: float | None = 0.0
) -> DecodeTask:
    sequence = Mock()
    sequence.tokens = [1] * (num_prompt + num_generated)
    sequence.spec.token_ids = (1,) * num_prompt
    made = DecodeTask(cast("Any", None), cast("Any", "r"), 1, sequence, cast("Any", None), [])
    made.tpot_s, made.decodes_since = limit_s, since
    return made


def pace_of(*tasks: DecodeTask) -> DecodePace:
    return DecodePace(lambda: tasks)


def test_an_empty_worker_has_room_for_all() -> None:
    assert pace_of().room(5.0) == PaceRoom()


def test_steps_are_measured_by_those_who_decode() -> None:
    pace = pace_of(task(100, 20, math.inf), task(5000, 0, math.inf, since=None))
    pace.observe(0.02)
    assert pace.room(1.0) == PaceRoom(StepPace(0.02, 0.0), 5120)


def test_a_step_of_nobody_says_nothing() -> None:
    pace = pace_of(task(100, 0, math.inf, since=None))
    pace.observe(0.02)
    assert pace.room(1.0).pace == StepPace()


def test_the_strictest_counts_also_while_its_kv_is_awaited() -> None:
    room = pace_of(task(10, 5, 0.05), task(10, 0, 0.03, since=None)).room(0.1)
    assert room.strictest_s == 0.03
    assert room.context_tokens == 25


def test_what_is_spare_is_what_was_gained_and_what_is_made_up_for() -> None:
    pace = pace_of(task(100, 20, 0.03, since=10.0))
    pace.observe(0.02)
    ended = task(10, 20, math.inf)
    for _ in range(1000):
        pace.ended(ended)  # answers have 20 tokens
    # 20 tokens at 30 ms in 0.4 s; 20 more make up for 0.2 s.
    assert pace.room(10.4).spare_s == pytest.approx(0.2 + BEARABLE_MISSES * 0.2, rel=0.01)


def test_who_is_awaited_has_gained_nothing_yet() -> None:
    coming = pace_of(task(100, 0, 0.03, since=None), task(100, 0, math.inf, since=None))
    spare = coming.room(0.0).spare_s
    assert spare == pace_of(task(100, 0, 0.03, since=0.0)).room(0.0).spare_s < math.inf


def test_what_never_decoded_is_no_answer() -> None:
    pace = pace_of(task(100, 0, 0.03))
    pace.observe(0.02)
    before = pace.room(0.0)
    pace.ended(task(10, 0, 0.03, since=None))
    assert pace.room(0.0) == before


def test_prompts_beside_decode_are_bounded_by_the_strictest_gap() -> None:
    patient, strict = task(100, 20, math.inf), task(100, 20, math.inf)
    strict.itl_s = 0.05
    pace = pace_of(patient, strict)
    pace.observe(0.02)
    pace.observe(0.02 + 0.1, 502)  # 500 tokens of a prompt took 0.1 s
    assert pace.rules(Role.DECODE).beside_decode == int((KEPT_SHARE * 0.05 - 0.02) / 2e-4)
    strict.itl_s = math.inf
    assert pace.rules(Role.DECODE).beside_decode is None


def test_a_gap_bounds_nothing_before_its_sequence_decodes() -> None:
    awaited = task(100, 0, math.inf, since=None)
    awaited.itl_s = 0.05
    assert pace_of(awaited).rules(Role.DECODE).beside_decode is None


def test_the_role_says_what_comes_first_and_limits_come_before_it() -> None:
    streams = task(100, 20, math.inf), task(100, 20, math.inf)
    pace = pace_of(*streams)
    pace.observe(0.02)
    pace.observe(0.02 + 0.1, 502)
    assert pace.rules(Role.HYBRID) == pace.rules(Role.DECODE) == StepRules()
    assert pace.rules(Role.PREFILL) == StepRules(prompts_first=True)
    streams[1].tpot_s = 1.0
    assert pace.rules(Role.PREFILL) == StepRules()
