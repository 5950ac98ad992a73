"""Shows the progress of a long computation on stderr: a bar on a terminal, else a line per stage.

Tests: tests/unit/cli/test_progress.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

_BAR = 20
"""Width of the bar in columns, so that a line fits into 80."""

Advance = Callable[[str], None]
"""Callback after each finished unit, with a text about the present state."""


class Stages:
    """Shows the stages of a computation, one after the other.

    Args:
        unit: name of the counted units, in the plural.
        command: prefix of the lines without a terminal; empty: no lines.
    """

    def __init__(self, unit: str, command: str = "", console: Console | None = None) -> None:
        self._unit = unit
        self._command = command
        self._console = console or Console(stderr=True)

    @contextmanager
    def stage(self, name: str, total: int, detail: str = "") -> Iterator[Advance]:
        """Shows one stage while the context lasts.

        Args:
            total: number of its units.
            detail: text to show before its first unit is done.
        """
        if not self._console.is_terminal:
            if self._command:
                more = f"; {detail}" if detail else ""
                line = f"{self._command}: {name}, {total:,} {self._unit}{more}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            yield lambda _detail: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR),
            MofNCompleteColumn(),
            TextColumn(f"{self._unit}, {{task.fields[detail]}}" if detail else self._unit),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(name, total=total, detail=detail)
            yield lambda text: progress.update(task, advance=1, detail=text)
