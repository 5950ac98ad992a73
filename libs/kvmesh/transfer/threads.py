"""Blocking work in threads that a cancelled caller waits for. Tests: test_channels.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(
    threads: Executor, work: Callable[[], T], on_cancel: Callable[[], None] | None = None
) -> T:
    """Runs blocking work in a thread; a cancelled caller still waits for its end.

    Without that wait the thread would use memory that belongs to others once the caller is gone.

    Args:
        on_cancel: makes the work end soon.

    Raises:
        CancelledError: after the work's end, if the caller was cancelled meanwhile.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    # run_in_executor with asyncio.wait would cost as much as the thread switch itself.
    future = threads.submit(work)
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    cancelled = False
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError:
            cancelled = True
            if on_cancel is not None:
                on_cancel()
    if cancelled:
        future.exception()
        raise asyncio.CancelledError
    return future.result()
