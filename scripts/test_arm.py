"""`make test-arm`: the C++ libraries for arm64 (NEON), compiled here and checked under an emulator.

    apt install g++-aarch64-linux-gnu qemu-user
    python -m scripts.test_arm

With another compiler and no emulator the same check runs on this machine's own instructions:

    python -m scripts.test_arm --compiler g++ --machine x86_64 --emulator ""

Tests: tests/unit/packaging/test_native_check.py.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvmesh.core.native_libraries import LEVELS, LIBRARIES, Level

ROOT = Path(__file__).resolve().parents[1]
CHECK = ROOT / "tests" / "native" / "check.cpp"


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles the check for each level of the machine and runs it; 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    parser.add_argument("--machine", default="aarch64", choices=sorted(LEVELS))
    parser.add_argument("--level", default="", help="of those of the machine; empty: all")
    parser.add_argument("--emulator", default="qemu-aarch64", help="empty: none")
    options = parser.parse_args(argv)
    emulator = shlex.split(options.emulator)
    missing = [tool for tool in (options.compiler, *emulator[:1]) if shutil.which(tool) is None]
    if missing:
        sys.stderr.write(
            f"{', '.join(missing)}: not found; apt install g++-aarch64-linux-gnu qemu-user\n"
        )
        return 1
    levels = [level for level in LEVELS[options.machine] if options.level in ("", level.name)]
    return max(_run(options.compiler, level, emulator) for level in levels)


def _run(compiler: str, level: Level, emulator: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "check")
        sources = [str(path) for library in LIBRARIES for path in _units(library.sources())]
        # Warnings are errors here: nobody else compiles for this machine.
        flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fno-math-errno", "-fopenmp"]
        command = [compiler, *flags, "-static", "-pthread", *level.flags, str(CHECK), *sources]
        sys.stdout.write(f"{level.name}:\n")
        sys.stdout.flush()
        subprocess.run([*command, "-o", program], check=True)
        return int(subprocess.run([*emulator, program], check=False).returncode != 0)


def _units(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path.suffix == ".cpp"]


if __name__ == "__main__":
    sys.exit(main())
