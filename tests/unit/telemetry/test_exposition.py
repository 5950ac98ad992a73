"""Processes that share a folder: any of them tells the sums of all, also of those that ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvmesh.core.config import child_environment
from kvmesh.telemetry.exposition import SHARED_FOLDER_VARIABLE, exposition, shared_registry

COUNT = """
import sys
from prometheus_client import Counter
from kvmesh.telemetry.exposition import exposition
Counter("requests", "Requests.").inc(int(sys.argv[1]))
print(exposition().decode())
"""


def _process(folder: Path, count: int) -> str:
    return subprocess.run(
        [sys.executable, "-c", COUNT, str(count)],
        env=child_environment({SHARED_FOLDER_VARIABLE: str(folder)}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_counters_add_up_over_processes(tmp_path: Path) -> None:
    assert "requests_total 2.0" in _process(tmp_path, 2)
    assert "requests_total 5.0" in _process(tmp_path, 3)
    assert shared_registry(tmp_path).get_sample_value("requests_total") == 5.0


def test_alone_a_process_tells_its_own() -> None:
    assert b"python_info" in exposition()
