from __future__ import annotations

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.step_rules import (
    MAX_LEFT_OUT,
    StepPriority,
    StepRules,
    StepTurns,
    priority_of,
    step_rules,
)


def test_each_role_has_its_priority() -> None:
    assert {role: priority_of(role) for role in Role} == {
        Role.PREFILL: StepPriority.PREFILL,
        Role.DECODE: StepPriority.DECODE,
        Role.HYBRID: StepPriority.MIXED,
        Role.SPARE: StepPriority.DECODE,
    }


@pytest.mark.parametrize(
    ("priority", "has_limits", "limit", "share", "rules"),
    [
        (StepPriority.PREFILL, False, None, 64, StepRules(True, None)),
        (StepPriority.PREFILL, True, 32, 64, StepRules(False, 32)),
        (StepPriority.DECODE, False, None, 64, StepRules(False, None)),
        (StepPriority.DECODE, True, 32, 16, StepRules(False, 32)),
        (StepPriority.MIXED, False, None, 64, StepRules(False, 64)),
        (StepPriority.MIXED, True, 32, 64, StepRules(False, 32)),
        (StepPriority.MIXED, False, None, None, StepRules(False, None)),
    ],
)
def test_limits_of_requests_come_before_the_role(
    priority: StepPriority,
    has_limits: bool,
    limit: int | None,
    share: int | None,
    rules: StepRules,
) -> None:
    assert step_rules(priority, has_limits=has_limits, limit=limit, share=share) == rules


def test_decoding_is_not_left_out_for_ever() -> None:
    turns, rules = StepTurns(), StepRules(prompts_first=True)
    for _ in range(3):
        for _ in range(MAX_LEFT_OUT):
            assert turns.prompts_first(rules)
            turns.note(left_out=True)
        assert not turns.prompts_first(rules)
        turns.note(left_out=False)
    assert not turns.prompts_first(StepRules())
