"""docker-compose.yml, built and run for real; `make e2e-compose` shows its progress."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.local_containers import missing_requirements

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.compose
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_stack_survives_the_death_of_a_decode_container() -> None:
    missing = missing_requirements()
    if missing:
        pytest.skip("; ".join(missing))
    done = subprocess.run(
        [sys.executable, "-m", "scripts.compose_e2e"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
