from __future__ import annotations

import io
import re

from rich.console import Console

from kvmesh.cli.progress import Stages


def _run(
    console: Console, detail: str = "9 s to simulate", command: str = "kvmesh simulate"
) -> None:
    stages = Stages("requests", command, console)
    with stages.stage("mine", 2, detail) as advance:
        advance("4 of 9 s simulated")
        advance("9 of 9 s simulated")


def test_a_terminal_gets_a_bar_with_counts_virtual_time_and_time_left() -> None:
    shown = io.StringIO()
    _run(Console(file=shown, force_terminal=True, width=80))
    last = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.getvalue()).strip().split("mine ")[-1]
    assert re.search(r"━ 2/2 requests, 9 of 9 s simulated 0:00:00$", last)


def test_elsewhere_a_stage_is_one_line_if_lines_are_wanted() -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=40)
    _run(console)
    _run(console, detail="")
    _run(console, command="")
    assert shown.getvalue() == (
        "kvmesh simulate: mine, 2 requests; 9 s to simulate\nkvmesh simulate: mine, 2 requests\n"
    )
