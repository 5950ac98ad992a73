from __future__ import annotations

import io

from rich.console import Console

from kvmesh.cli.stack_display import StackDisplay, State
from kvmesh.core.types import Endpoint

ENDPOINTS = {"a": Endpoint("127.0.0.1", 1), "b": Endpoint("127.0.0.1", 2)}


def test_a_file_gets_one_line_per_change() -> None:
    output = io.StringIO()
    display = StackDisplay(Console(file=output), ENDPOINTS)
    with display:
        display.set_state("a", State.STARTING, 10.0)
        display.set_state("a", State.READY, 12.5)
        display.set_state("a", State.READY, 13.0)
    assert [line.split() for line in output.getvalue().splitlines()] == [
        ["a", "starting"],
        ["a", "ready", "after", "2.5", "s"],
    ]


def test_a_failure_counts_from_the_start_of_the_process() -> None:
    output = io.StringIO()
    display = StackDisplay(Console(file=output), ENDPOINTS)
    for state, now_s in ((State.STARTING, 10.0), (State.READY, 12.5), (State.FAILED, 70.0)):
        display.set_state("a", state, now_s)
    assert output.getvalue().split()[-4:] == ["failed", "after", "60.0", "s"]


def test_a_terminal_gets_a_table() -> None:
    output = io.StringIO()
    display = StackDisplay(Console(file=output, force_terminal=True, width=80), ENDPOINTS)
    with display:
        display.set_state("a", State.STARTING, 10.0)
        display.refresh(11.5)
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(display.table())
    rows = [line.split() for line in plain.export_text().splitlines()]
    assert rows[1:] == [["a", "starting", "1.5", "127.0.0.1:1"], ["b", "waiting", "127.0.0.1:2"]]
    assert "1.5" in output.getvalue()
    display.set_state("a", State.READY, 12.0)
    assert "ready after 2.0 s" in output.getvalue(), "a line, once the table is complete"
