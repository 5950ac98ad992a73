"""The terminal that commands print tables to. Tests: tests/unit/cli/test_screen.py."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_COLUMNS = 160


def terminal() -> Console:
    """Returns a console on standard output; a pipe or file gets lines of `PIPE_COLUMNS`."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
