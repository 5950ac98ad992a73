"""Several generations of one call as one stream of pieces, in the order in which they arrive.

Tests: tests/unit/gateway/test_merge.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def merge(
    streams: Sequence[AsyncGenerator[ItemT, None]],
) -> AsyncGenerator[ItemT, None]:
    """Yields from all streams until all have ended.

    The first error of a stream ends the whole; closing closes all. What one stream has ready is
    bounded by its own length.
    """
    if len(streams) == 1:  # no tasks in between: the usual case and the hot path
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[ItemT | asyncio.Task[None]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[ItemT, None]) -> None:
        async with aclosing(stream) as items:
            async for item in items:
                queue.put_nowait(item)

    tasks = [asyncio.get_running_loop().create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    running = len(tasks)
    try:
        while running:
            arrived = await queue.get()
            if isinstance(arrived, asyncio.Task):
                arrived.result()  # raises what ended it
                running -= 1
            else:
                yield arrived
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
