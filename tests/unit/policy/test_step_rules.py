from __future__ import annotations

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.step_rules import (
    MAX_LEFT_OUT,
    StepRules,
    StepTurns,
    step_rules,
)


def test_prompts_come_first_on_prefill_workers_only() -> None:
    rules = {role: step_rules(role, has_limits=False, limit=None) for role in Role}
    assert {role for role in Role if rules[role].prompts_first} == {Role.PREFILL}


@pytest.mark.parametrize(
    ("role", "has_limits", "limit", "rules"),
    [
        (Role.PREFILL, False, None, StepRules(True, None)),
        (Role.PREFILL, True, 32, StepRules(False, 32)),
        (Role.DECODE, False, None, StepRules(False, None)),
        (Role.DECODE, True, 32, StepRules(False, 32)),
    ],
)
def test_limits_of_requests_come_before_the_role(
    role: Role, has_limits: bool, limit: int | None, rules: StepRules
) -> None:
    assert step_rules(role, has_limits=has_limits, limit=limit) == rules


def test_decoding_is_not_left_out_for_ever() -> None:
    turns, rules = StepTurns(), StepRules(prompts_first=True)
    for _ in range(3):
        for _ in range(MAX_LEFT_OUT):
            assert turns.prompts_first(rules)
            turns.note(left_out=True)
        assert not turns.prompts_first(rules)
        turns.note(left_out=False)
    assert not turns.prompts_first(StepRules())
