"""The terminal that commands print tables to. Tests: tests/unit/cli/test_screen.py."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_COLUMNS = 160


def terminal() -> Console:
    """Standard output; a pipe or a file has room for whole lines."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_COLUMNS)
