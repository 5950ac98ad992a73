"""Long work on the event loop, a part at a time: what else is due runs between two parts.

Tests: tests/unit/core/test_turns.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Made = TypeVar("Made")

Parts = Generator[None, None, Made]
"""Work that yields after each part and returns what it made."""

WORKERS_IN_A_TURN = 200
"""Of a fleet are looked at in one part: half a millisecond, as a rule."""


async def in_turns(work: Parts[Made]) -> Made:
    """Does all of it."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            made: Made = end.value
            return made
        await asyncio.sleep(0)


def at_once(work: Parts[Made]) -> Made:
    """Does all of it where nothing else waits."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            made: Made = end.value
            return made
