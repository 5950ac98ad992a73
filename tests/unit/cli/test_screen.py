from __future__ import annotations

import pytest

from kvmesh.cli.screen import PIPE_COLUMNS, terminal


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    line = "x " * (PIPE_COLUMNS // 2 - 1)
    terminal().print(line)
    assert capsys.readouterr().out == line + "\n"
