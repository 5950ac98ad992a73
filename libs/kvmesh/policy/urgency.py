"""Chooses the waiting prompts that are planned next, and how many workers a plan may use.

The dynamic program of `elastic.py` (TokenLake 6.2) divides workers among the given prompts; later
prompts wait for its batches. If long prompts took all workers, short prompts behind them would miss
their short TTFT limits. Tests: tests/unit/policy/test_urgency.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

SPARE_SHARE = 0.25
"""Fraction of the free workers that a plan leaves for the next prompts."""


def most_urgent(waiting: Sequence[T], slack_s: Callable[[T], float], count: int) -> list[T]:
    """Returns up to `count` waiting items, the most urgent first.

    Items that can still be in time come before items that cannot. The item that arrived first
    always gets a place, so that under lasting overload no item waits for more plans than there were
    items before it.

    Args:
        waiting: in order of arrival, which breaks ties.
        slack_s: returns the seconds until an item has to begin; negative: it is too late.
    """

    def place(item: T) -> tuple[bool, float]:
        slack = slack_s(item)
        return slack < 0, slack

    chosen = heapq.nsmallest(count, waiting, key=place)
    if chosen and waiting[0] not in chosen:
        chosen[-1] = waiting[0]
    return chosen


def num_usable(num_free: int) -> int:
    """Returns the number of workers that one plan may use; at least one if any is free."""
    return math.ceil(num_free * (1 - SPARE_SHARE))
