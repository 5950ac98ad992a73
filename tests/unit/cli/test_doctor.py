from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.doctor import main, table_of
from kvmesh.cli.findings import Finding
from kvmesh.cli.probes import free_ports


def test_the_exit_code_tells_of_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports("127.0.0.1", 1)
    local = ["--url", f"http://127.0.0.1:{port}", "--state-dir", str(tmp_path)]
    assert main([*local, "--model", str(tmp_path / "none")]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert f"nothing listens at port {port}" in shown
    assert "python" in shown


def test_a_finding_says_what_to_do() -> None:
    output = io.StringIO()
    findings = [Finding.ok("python", "3.11"), Finding.fail("redis", "gone [db]", "start it")]
    Console(file=output, width=80).print(table_of(findings))
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert lines[0] == ["OK", "python", "3.11"]
    assert lines[1] == ["FAIL", "redis", "gone", "[db]"]
    assert lines[2] == ["->", "start", "it"]
