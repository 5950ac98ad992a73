"""Divides the engine's steps between prompts and sequences that decode, by the worker's role.

FlowKV's hybrid scheduler gives each cycle to prefill or to decode, as the controller says (3.4).
Here the role says it: on a prefill worker prompts come first, on all others decoding does, and
prompts take the rest of the step. Tests: tests/unit/policy/test_step_rules.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import Role

MAX_LEFT_OUT = 2
"""Maximum number of steps in a row without decoding while prompts come first. A worker that changed
its role still decodes its sequences, at a third of the steps or more."""


@dataclass(frozen=True, slots=True)
class StepRules:
    """Rules of the next steps.

    Attributes:
        prompts_first: whether prompts take their tokens before sequences that decode.
        beside_decode: maximum number of prompt tokens in a step in which a sequence decodes; None:
            as many as the step's budget leaves.
    """

    prompts_first: bool = False
    beside_decode: int | None = None


def step_rules(role: Role, *, has_limits: bool, limit: int | None) -> StepRules:
    """Returns the rules of the next steps of a worker with this role.

    Args:
        has_limits: whether a sequence that decodes has a limit on its time per token or between
            tokens. Then decoding goes first in every role.
        limit: maximum number of prompt tokens with which these limits are kept; None for any.
    """
    return StepRules(role is Role.PREFILL and not has_limits, limit)


class StepTurns:
    """Counts the steps in a row that left out decoding."""

    def __init__(self) -> None:
        self._left_out = 0

    def prompts_first(self, rules: StepRules) -> bool:
        """Whether prompts come first in the next step."""
        return rules.prompts_first and self._left_out < MAX_LEFT_OUT

    def note(self, *, left_out: bool) -> None:
        """Notes a planned step, and whether sequences that decode were left out of it."""
        self._left_out = self._left_out + 1 if left_out else 0
