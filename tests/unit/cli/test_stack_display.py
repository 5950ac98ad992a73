from __future__ import annotations

import io

from rich.console import Console

from kvmesh.cli.stack_display import StackDisplay, State
from kvmesh.core.types import Endpoint

ENDPOINTS = {"a": Endpoint("127.0.0.1", 1), "b": Endpoint("127.0.0.1", 2)}


def display_of(console: Console) -> StackDisplay:
    display = StackDisplay(console)
    for name, endpoint in ENDPOINTS.items():
        display.add(name, endpoint)
    return display


def test_a_file_gets_one_line_per_change() -> None:
    output = io.StringIO()
    display = display_of(Console(file=output))
    with display:
        display.set_state("a", State.STARTING, 10.0)
        display.set_state("a", State.READY, 12.5)
        display.set_state("a", State.READY, 13.0)
    assert [line.split() for line in output.getvalue().splitlines()] == [
        ["a", "starting"],
        ["a", "ready", "after", "2.5", "s"],
    ]


def test_a_restart_is_told_when_the_process_is_ready_again() -> None:
    output = io.StringIO()
    display = display_of(Console(file=output))
    states = (State.STARTING, State.READY, State.FAILED, State.STARTING, State.READY)
    for state, now_s in zip(states, (10.0, 12.5, 70.0, 70.5, 73.0), strict=True):
        display.set_state("a", state, now_s)
    assert output.getvalue().splitlines()[2:] == ["a            ready again after 2.5 s"]


def test_a_terminal_gets_a_table() -> None:
    output = io.StringIO()
    display = display_of(Console(file=output, force_terminal=True, width=80))
    with display:
        display.set_state("a", State.STARTING, 10.0)
        display.set_detail("a", "loading [model]")
        display.refresh(11.5)
    plain = Console(file=io.StringIO(), width=80, record=True)
    plain.print(display.table())
    rows = [line.split() for line in plain.export_text().splitlines()]
    assert rows[1:] == [
        ["a", "starting", "1.5", "127.0.0.1:1", "loading", "[model]"],
        ["b", "waiting", "127.0.0.1:2"],
    ]
    assert "1.5" in output.getvalue()
    display.set_state("a", State.READY, 12.0)
    assert "ready after 2.0 s" in output.getvalue(), "a line, once the table is complete"
