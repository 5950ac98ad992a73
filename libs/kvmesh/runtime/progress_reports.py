"""Reports that a prompt makes progress, so that its gateway waits for it, however long it takes.

Tests: tests/integration/test_progress_reports.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ProgressReports:
    """Looks at a prompt's progress at an interval, until closed.

    Args:
        interval_s: seconds between two looks.
        progress: returns a value that changes when there is progress.
        report: called at each look that finds another value than the look before.
    """

    def __init__(
        self, interval_s: float, progress: Callable[[], object], report: Callable[[], None]
    ) -> None:
        self._interval_s = interval_s
        self._progress = progress
        self._report = report
        self._seen = progress()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._look)

    def close(self) -> None:
        """Ends the reports. May be called again."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        before, self._seen = self._seen, self._progress()
        if self._seen != before:
            self._report()
