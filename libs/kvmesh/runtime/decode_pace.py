"""How fast a worker's sequences get their tokens, and what it can take on beside them.

The rules are in `kvmesh.policy.token_pace`; this reads clock and sequences for them.
Tests: tests/unit/runtime/test_decode_pace.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from kvmesh.core.pace import PaceRoom
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

    def observe(self, seconds: float) -> None:
        """Takes a step that has just ended and computed no prompt."""
        context = sum(_context(task) for task in self._tasks() if task.decodes_since is not None)
        if context:
            self._fit.add(context, seconds)

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
        decoding = sum(_context(task) for task in tasks if task.decodes_since is not None)
        return PaceRoom(
            pace,
            context,
            min(task.tpot_s for task in limited),
            spare_s(paced, pace.of(decoding), self._answers.tokens),
        )


def _context(task: DecodeTask) -> int:
    return len(task.sequence.tokens)
