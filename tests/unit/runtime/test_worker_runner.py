"""How an engine's threads wait, in processes of their own: OpenMP is told when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.runtime.worker_runner import WAITING
from tests.unit.engine.tiny_checkpoint import write_checkpoint

_LOAD = """
import sys
import kvmesh.runtime.worker
from kvmesh.runtime.worker_config import EngineSection
from kvmesh.runtime.worker_runner import load_runner

load_runner(EngineSection(model=sys.argv[1], num_blocks=8)).close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP elsewhere")
@pytest.mark.parametrize(("given", "spins"), [({}, "0"), ({"GOMP_SPINCOUNT": "500"}, "500")])
def test_threads_wait_asleep_unless_the_environment_says_otherwise(
    tmp_path: Path, given: dict[str, str], spins: str
) -> None:
    rest = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(write_checkpoint(tmp_path))],
        env=rest | given | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
