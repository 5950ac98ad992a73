"""Which of the prompts that wait are planned next, and how many workers may work on them.

The program of `elastic.py` divides workers among the prompts that it is given; what comes a moment
later has to wait for its batches. Short prompts, whose objectives are short, would miss them behind
long ones that have all workers. Tests: tests/unit/policy/test_urgency.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

SPARE_SHARE = 0.25
"""Of the free workers, left to those that come next."""


def most_urgent(waiting: Iterable[T], slack_s: Callable[[T], float], count: int) -> list[T]:
    """Up to `count` of those that wait, the most urgent first.

    Who can still be in time comes before who cannot: its place would be lost on the other one.

    Args:
        waiting: in order of arrival, which decides between equals.
        slack_s: seconds that may pass before it has to begin; below zero it is too late.
    """

    def place(item: T) -> tuple[bool, float]:
        slack = slack_s(item)
        return slack < 0, slack

    return heapq.nsmallest(count, waiting, key=place)


def num_usable(num_free: int) -> int:
    """Workers that one plan may take; at least one of those that are free."""
    return math.ceil(num_free * (1 - SPARE_SHARE))
