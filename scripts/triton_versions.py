"""`make test-triton`: the kernels' tests under releases of Triton, each in a temporary folder.

A release lies in front of the installed one on PYTHONPATH; everything else stays as installed.
Without a device: numbers in the interpreter, and compilation. A line per release says what passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvmesh.core.config import child_environment, environment

ROOT = Path(__file__).parents[1]
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
_TESTS = "tests/unit/kernels/test_triton_kernels.py"
# What tests/unit/kernels/apart.py says.
_COUNTED = re.compile(r"^\.?(\d+ tests (?:interpreted|compiled))$", re.MULTILINE)


def main() -> int:
    """Tries the releases one after the other; the number of those that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    failed = 0
    for release in parser.parse_args().releases:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvmesh-triton-") as folder:
            passed = _try(release, Path(folder))
        took = time.monotonic() - started
        said = "FAILED" if passed is None else f"passed: {', '.join(passed)}"
        sys.stdout.write(f"triton {release} {said} ({took:.0f} s)\n")
        sys.stdout.flush()
        failed += passed is None
    return failed


def _try(release: str, folder: Path) -> list[str] | None:
    """What passed under a release, None where something did not; that it says itself."""
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    install += ["--disable-pip-version-check", "--target", str(folder), f"triton=={release}"]
    before = environment("PYTHONPATH")
    path = os.pathsep.join([str(folder), *([before] if before else [])])
    inherited = child_environment({"PYTHONPATH": path})
    seen = f"import triton; assert triton.__version__ == {release!r}, triton.__file__"
    tests = ["-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "--timeout", "0", _TESTS]
    said = ""
    for arguments, given in ((install, None), (["-c", seen], inherited), (tests, inherited)):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=given,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        said = done.stdout
        if done.returncode != 0:
            sys.stdout.write(said)
            return None
    return _COUNTED.findall(said)


if __name__ == "__main__":
    sys.exit(main())
