"""Which of the prompts that wait are planned next, and how many workers may work on them.

The program of `elastic.py` divides workers among the prompts that it is given; what comes a moment
later has to wait for its batches. Short prompts, whose objectives are short, would miss them behind
long ones that have all workers. Tests: tests/unit/policy/test_urgency.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

SPARE_SHARE = 0.25
"""Of the free workers, left to those that come next."""


def most_urgent(waiting: Sequence[T], slack_s: Callable[[T], float], count: int) -> list[T]:
    """Up to `count` of those that wait, the most urgent first; of more, the one that came first has
    a place too, so that under lasting overload nobody waits for more plans than others were there
    before.

    Who can still be in time comes before who cannot: its place would be lost on the other one.

    Args:
        waiting: in order of arrival, which decides between equals.
        slack_s: seconds that may pass before it has to begin; below zero it is too late.
    """

    def place(item: T) -> tuple[bool, float]:
        slack = slack_s(item)
        return slack < 0, slack

    chosen = heapq.nsmallest(count, waiting, key=place)
    if chosen and waiting[0] not in chosen:
        chosen[-1] = waiting[0]
    return chosen


def num_usable(num_free: int) -> int:
    """Workers that one plan may take; at least one of those that are free."""
    return math.ceil(num_free * (1 - SPARE_SHARE))
