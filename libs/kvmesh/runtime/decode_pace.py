"""The speed of a worker's decoding, and its room for further requests.

The rules are in `kvmesh.policy.token_pace`; this module gives them the clock and the sequences.
Tests: tests/unit/runtime/test_decode_pace.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from kvmesh.core.pace import PaceRoom
from kvmesh.core.types import Role
from kvmesh.policy.mixed_step import MixedSteps
from kvmesh.policy.step_rules import StepRules, step_rules
from kvmesh.policy.token_pace import AnswerLength, StepFit, spare_s
from kvmesh.runtime.decode_task import DecodeTask


class DecodePace:
    """Measures decode steps and answer lengths, and computes the room that they leave.

    Args:
        tasks: returns the requests on the decode side now.
    """

    def __init__(self, tasks: Callable[[], Collection[DecodeTask]]) -> None:
        self._tasks = tasks
        self._fit = StepFit()
        self._answers = AnswerLength()
        self._mixed = MixedSteps()

    def observe(self, seconds: float, num_computed: int = 0) -> tuple[int, float] | None:
        """Adds a step that has just ended.

        Args:
            num_computed: tokens of the step, including decoded ones, if it computed a part of a
                prompt; else 0.

        Returns:
            Its prompt tokens, and the seconds that they took beyond decoding; None without any.
        """
        decoding = self._decoding()
        context = sum(map(_context, decoding))
        if num_computed > len(decoding):
            num_tokens = num_computed - len(decoding)
            prompts_s = max(seconds - self._decode_s(context), 0.0)
            self._mixed.add(num_tokens, prompts_s)
            return num_tokens, prompts_s
        if context:
            self._fit.add(context, seconds)
        return None

    def rules(self, role: Role) -> StepRules:
        """Rules that divide the next step between prompts and decoding sequences.

        The role decides, as far as all gaps between tokens keep their limits.
        """
        decoding = self._decoding()
        limit_s = min((task.itl_s for task in decoding), default=math.inf)
        decode_s = self._decode_s(sum(map(_context, decoding)))
        return step_rules(
            role,
            has_limits=any(math.isfinite(task.tpot_s) for task in decoding),
            limit=self._mixed.most_tokens(limit_s, decode_s),
        )

    def _decoding(self) -> list[DecodeTask]:
        return [task for task in self._tasks() if task.decodes_since is not None]

    def _decode_s(self, context: int) -> float:
        """Seconds of a step that only decodes, for `context` tokens of context in total."""
        return self._fit.pace().of(context) if context else 0.0

    def ended(self, task: DecodeTask) -> None:
        """Adds a request that ended, for any reason."""
        if task.decodes_since is not None:
            self._answers.add(task.num_generated)

    def room(self, now: float) -> PaceRoom:
        """The room that is left now for requests with limits."""
        tasks = self._tasks()
        pace = self._fit.pace()
        limited = [task for task in tasks if math.isfinite(task.tpot_s)]
        context = sum(map(_context, tasks))
        if not limited:
            return PaceRoom(pace, context)
        # The KV of a reserved request may arrive in the middle of a prompt's step.
        paced = [
            (task.tpot_s, 0, 0.0)
            if task.decodes_since is None
            else (task.tpot_s, task.num_generated, now - task.decodes_since)
            for task in limited
        ]
        decode_s = pace.of(sum(map(_context, self._decoding())))
        spare = spare_s(paced, decode_s, self._answers.tokens)
        if not self._mixed.has_room(min(task.itl_s for task in limited), decode_s):
            spare = 0.0
        return PaceRoom(pace, context, min(task.tpot_s for task in limited), spare)


def _context(task: DecodeTask) -> int:
    return len(task.sequence.tokens)
