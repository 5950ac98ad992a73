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
