"""Shows a starting stack: a live table on a terminal; without one, and after the start, one line
for each process that starts or is ready.

Tests: tests/unit/cli/test_stack_display.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvmesh.core.types import Endpoint


class State(enum.Enum):
    """State of a process."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


_STYLES = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.FAILED: "bold red",
}


@dataclass(slots=True)
class _Row:
    endpoint: Endpoint
    state: State = State.WAITING
    detail: str = ""
    num_starts: int = 0
    since_s: float = 0.0
    took_s: float | None = None


class StackDisplay:
    """Shows the state of each process; the context manager lasts while the stack starts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, _Row] = {}
        self._now_s = 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def add(self, name: str, endpoint: Endpoint) -> None:
        """Adds a process."""
        self._rows[name] = _Row(endpoint)

    def remove(self, name: str) -> None:
        """Removes a process."""
        self._rows.pop(name, None)

    def set_state(self, name: str, state: State, now_s: float) -> None:
        """Sets a process's state; the shown seconds count from the start of the process."""
        row = self._rows[name]
        if state is row.state:
            return
        if state is State.STARTING:
            row.since_s, row.took_s = now_s, None
            row.num_starts += 1
        elif row.took_s is None or state is State.FAILED:  # it may have been ready for a long time
            row.took_s = now_s - row.since_s
        row.state = state
        if self._live is None:
            self._print(name, row)
        self.refresh(now_s)

    def _print(self, name: str, row: _Row) -> None:
        """Prints a change, except failures and restarts, which the launcher reports."""
        if row.state is State.STARTING and row.num_starts == 1:
            self._console.print(f"{name:12} starting", highlight=False)
        if row.state is State.READY:
            again = "again " if row.num_starts > 1 else ""
            text = f"{name:12} ready {again}after {row.took_s or 0.0:.1f} s"
            self._console.print(text, highlight=False)

    def set_detail(self, name: str, detail: str) -> None:
        """Sets a process's activity in the table; shown with the next refresh."""
        self._rows[name].detail = detail

    def refresh(self, now_s: float) -> None:
        """Updates the seconds of starting processes."""
        self._now_s = now_s
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """Returns the rows as a table."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("process")
        table.add_column("state")
        table.add_column("seconds", justify="right")
        table.add_column("address")
        table.add_column("doing", no_wrap=True, overflow="ellipsis")
        for name, row in self._rows.items():
            seconds = row.took_s
            if row.state is State.STARTING:
                seconds = self._now_s - row.since_s
            table.add_row(
                name,
                f"[{_STYLES[row.state]}]{row.state.value}[/]",
                "" if seconds is None else f"{seconds:.1f}",
                f"[dim]{row.endpoint}[/]",
                Text(row.detail, style="dim"),
            )
        return table

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None  # later changes are printed as lines
