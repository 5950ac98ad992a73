from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from kvmesh.cli.descendants import adopt_orphans, kill_descendants, reap_orphans
adopt_orphans()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
# A child that ends at once and leaves a process behind, in a session of its own.
leave = "import subprocess, sys; "
leave += "print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=-3, stderr=-3).pid)"
orphans = [
    int(subprocess.run([sys.executable, "-c", leave, *sleep], capture_output=True).stdout)
    for _ in range(2)
]
own = subprocess.Popen(sleep)
ended = subprocess.Popen(["true"])
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
os.kill(orphans[0], 9)
os.waitid(os.P_PID, orphans[0], os.WEXITED | os.WNOWAIT)
reap_orphans([ended.pid])
assert not Path(f"/proc/{orphans[0]}").exists(), "it is off the process table"
assert ended.wait() == 0, "own children are left to those that wait for them"
kill_descendants()
print(orphans[1], own.pid)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to an ancestor")
def test_nothing_is_left_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())
