"""`make test-triton`: the kernels' tests under releases of Triton, each in a temporary folder.

A release lies in front of the installed one on PYTHONPATH; everything else stays as installed.
Without a device: numbers in the interpreter, and compilation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvmesh.core.config import child_environment, environment

ROOT = Path(__file__).parents[1]
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
_TESTS = "tests/unit/kernels/test_triton_kernels.py"


def main() -> int:
    """Tries the releases one after the other; the number of those that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES)
    failed = 0
    for release in parser.parse_args().releases:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvmesh-triton-") as folder:
            is_good = _install(release, Path(folder)) and _passes(Path(folder), release)
        took = time.monotonic() - started
        sys.stdout.write(f"triton {release}: {'passed' if is_good else 'FAILED'} ({took:.0f} s)\n")
        sys.stdout.flush()
        failed += not is_good
    return failed


def _install(release: str, folder: Path) -> bool:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(folder), f"triton=={release}"]
    return subprocess.run(command, check=False).returncode == 0


def _passes(folder: Path, release: str) -> bool:
    before = environment("PYTHONPATH")
    path = os.pathsep.join([str(folder), *([before] if before else [])])
    inherited = child_environment({"PYTHONPATH": path})
    seen = f"import triton; assert triton.__version__ == {release!r}, triton.__file__"
    tests = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "0", _TESTS]
    return all(
        subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=inherited, check=False
        ).returncode
        == 0
        for arguments in (["-c", seen], tests)
    )


if __name__ == "__main__":
    sys.exit(main())
