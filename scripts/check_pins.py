"""`make check-pins`: whether the pinned versions go together on all Pythons and machines we name.

pip resolves for the machine that it runs on, and an index may offer builds there that others do not
see: a CPU build of torch names no triton, and the build on PyPI names a release. uv resolves for
any machine, from the packages' metadata on PyPI alone. Nothing is installed.
Tests: tests/unit/packaging/test_check_pins.py.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
LIBC = "manylinux_2_36"
"""That of Debian 12; later ones take the same wheels."""
EXTRAS = ("dev", "outside")
"""All extras but `vllm`, which has an environment of its own; `dev` contains the others."""

_RESOLVE = ("-m", "uv", "pip", "compile", "pyproject.toml", "--no-config", "--quiet")
_WHEELS = ("--only-binary", ":all:")


def problem(python: str, machine: str, constraints: Path) -> str:
    """Returns uv's reason why the pinned versions cannot be installed there; empty if they can."""
    done = subprocess.run(
        [
            *(sys.executable, *_RESOLVE, *_WHEELS),
            *(part for extra in EXTRAS for part in ("--extra", extra)),
            *("--constraint", str(constraints), "--python-version", python),
            *("--python-platform", f"{machine}-{LIBC}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip() or f"uv exits {done.returncode}"


def main() -> int:
    """Prints a line for each Python and machine. Returns the number of those with a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("constraints", nargs="?", type=Path, default=ROOT / "constraints.txt")
    constraints: Path = parser.parse_args().constraints.resolve()
    failed = 0
    for python, machine in itertools.product(PYTHONS, MACHINES):
        found = problem(python, machine, constraints)
        failed += bool(found)
        print(f"Python {python}, {machine}: {found or 'the pins go together'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
