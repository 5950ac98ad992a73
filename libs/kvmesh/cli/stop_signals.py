"""Handles Ctrl-C and other stop signals for a program with an event loop.

Tests: tests/e2e/test_interrupted_up.py.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP from its creation to the end of the process.

    The handlers stay installed after the event loop has closed, so that a late signal changes
    neither the output nor the exit code. An ignored SIGHUP, as under `nohup`, stays ignored.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_repeat: Callable[[], None] = lambda: None
        self._count = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def attach(self, on_repeat: Callable[[], None]) -> None:
        """Notifies the running event loop from now on.

        Args:
            on_repeat: called for each signal after the first.
        """
        self._loop = asyncio.get_running_loop()
        self._on_repeat = on_repeat
        self._tell(self._count)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, self._count)

    def _tell(self, count: int) -> None:
        if count >= 1:
            self.asked.set()
        if count >= 2:
            self._on_repeat()
