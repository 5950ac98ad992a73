"""Runs long work on the event loop in parts, so that other callbacks run between two parts.

Tests: tests/unit/core/test_turns.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Made = TypeVar("Made")

Parts = Generator[None, None, Made]
"""Work that yields after each part and returns its result."""

WORKERS_IN_A_TURN = 200
"""Number of a fleet's workers processed in one part, which takes about half a millisecond."""


def is_turn_over(number: int, count: int = WORKERS_IN_A_TURN) -> bool:
    """Whether work on a fleet in parts of `count` items has a break before this item."""
    return number % count == count - 1


REST_FACTOR = 4.0
"""Pause of a loop over the fleet, as a multiple of the time that its last round took."""


def rest_s(least_s: float, took_s: float) -> float:
    """Returns the seconds that a loop over the fleet pauses before its next round.

    So no loop takes more than a fifth of a process, however large the fleet, and less if others
    keep the process busy.

    Args:
        least_s: pause in a small fleet.
        took_s: seconds that the last round took.
    """
    return max(least_s, REST_FACTOR * took_s)


async def in_turns(work: Parts[Made]) -> Made:
    """Runs the work to its end and lets other callbacks run between the parts."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            made: Made = end.value
            return made
        await asyncio.sleep(0)


def at_once(work: Parts[Made]) -> Made:
    """Runs the work to its end without a break, for callers outside an event loop."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            made: Made = end.value
            return made
