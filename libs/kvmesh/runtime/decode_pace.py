"""How fast a worker's sequences get their tokens, and what it can take on beside them.

The rules are in `kvmesh.policy.token_pace`; this reads clock and sequences for them.
Tests: tests/unit/runtime/test_decode_pace.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from kvmesh.core.pace import PaceRoom
from kvmesh.policy.mixed_step import MixedSteps
from kvmesh.policy.token_pace import AnswerLength, StepFit, spare_s
from kvmesh.runtime.decode_task import DecodeTask


class DecodePace:
    """Measures decode steps and answers, and tells what is left.

    Args:
        tasks: the requests on the decode side now.
    """

    def __init__(self, tasks: Callable[[], Collection[DecodeTask]]) -> None:
        self._tasks = tasks
        self._fit = StepFit()
        self._answers = AnswerLength()
        self._mixed = MixedSteps()

    def observe(self, seconds: float, num_computed: int = 0) -> None:
        """Takes a step that has just ended.

        Args:
            num_computed: tokens of the step, decoded ones included, if it computed a part of a
                prompt; else 0.
        """
        decoding = self._decoding()
        context = sum(map(_context, decoding))
        if num_computed > len(decoding):
            self._mixed.add(num_computed - len(decoding), seconds - self._decode_s(context))
        elif context:
            self._fit.add(context, seconds)

    def most_prompt_tokens(self) -> int | None:
        """Prompt tokens of the next step for which every gap between tokens keeps its limit; None
        for no bound.
        """
        decoding = self._decoding()
        limit_s = min((task.itl_s for task in decoding), default=math.inf)
        return self._mixed.most_tokens(limit_s, self._decode_s(sum(map(_context, decoding))))

    def _decoding(self) -> list[DecodeTask]:
        return [task for task in self._tasks() if task.decodes_since is not None]

    def _decode_s(self, context: int) -> float:
        """Time of a step that decodes only, with so many tokens of context together."""
        return self._fit.pace().of(context) if context else 0.0

    def ended(self, task: DecodeTask) -> None:
        """A request ends, however."""
        if task.decodes_since is not None:
            self._answers.add(task.num_generated)

    def room(self, now: float) -> PaceRoom:
        """What is left at this moment for requests with limits."""
        tasks = self._tasks()
        pace = self._fit.pace()
        limited = [task for task in tasks if math.isfinite(task.tpot_s)]
        context = sum(map(_context, tasks))
        if not limited:
            return PaceRoom(pace, context)
        # Those whose KV is awaited may come in the middle of a prompt.
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
