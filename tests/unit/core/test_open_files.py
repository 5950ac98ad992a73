from __future__ import annotations

import subprocess
import sys

_SHOW = """
import resource
from kvmesh.core.open_files import most_open_files, raise_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
before = most_open_files()
raise_open_files()
print(before, most_open_files() == (hard if hard > 0 else 1 << 20))
"""


def test_a_process_may_open_what_the_system_allows() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _SHOW], capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["200", "True"]
