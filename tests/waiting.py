"""Waiting for a fact: how tests wait for what other tasks and processes do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

FACT_S = 50.0
"""Long: a wait that does not end costs this once, one that is given up too soon a whole run. It
is less than the time limit of a test, so that what did not come true is said."""
POLL_S = 0.01
REST = 3
"""Times as long as a look takes, until the next one: metrics of a mesh cost its processes, too."""
REST_S = 0.1
"""At most."""


async def until(
    fact: Callable[[], object], what: str = "the fact", timeout_s: float = FACT_S
) -> None:
    """Waits until `fact` is true; it may be a coroutine function."""
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    while True:
        began = now()
        found = fact()
        if await found if inspect.isawaitable(found) else found:
            return
        ended = now()
        assert ended < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(max(POLL_S, min(REST_S, REST * (ended - began))))
