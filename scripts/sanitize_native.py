"""`python -m scripts.sanitize_native [TEST ...]`: C++ libraries under AddressSanitizer and UBSan.

The libraries are built into build/sanitized, and the tests run in a Python that has both sanitizers
loaded. Leaks are not looked for: Python and torch keep much until the process ends. Without a
compiler that is said, and nothing runs. `--build` needs no package installed and runs no test.
Tests: tests/unit/packaging/test_sanitize_native.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvmesh.core.config import child_environment
from kvmesh.core.native_libraries import usable_levels
from scripts.build_native import BuildError, build, find_compiler, say_on_terminal, targets

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitized"
FLAGS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    *("-O1", "-g1"),
)
TESTS = (
    "tests/unit/kernels/test_host.py",
    "tests/unit/kernels/test_host_layer.py",
    "tests/unit/kernels/test_host_linear.py",
    "tests/unit/kernels/test_linear.py",
    "tests/unit/kernels/test_partial.py",
    "tests/unit/kernels/test_latent.py",
    "tests/unit/transfer/test_native.py",
    "tests/unit/transfer/test_frame_socket.py",
    "tests/integration/test_lent_blocks.py",
)
# Sanitizers come before all else; the library of C++ beside them, or what it throws is not known.
_PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so")


def environment(compiler: str) -> dict[str, str]:
    """Of a Python whose memory the sanitizers watch."""
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in _PRELOADED
    ]
    return child_environment(
        {
            "LD_PRELOAD": " ".join(str(Path(path).resolve()) for path in found),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        }
    )


def main(arguments: Sequence[str]) -> int:
    """Builds and runs the tests, or those that are named; the exit code is theirs."""
    parser = argparse.ArgumentParser(description="Tests the C++ libraries under sanitizers.")
    parser.add_argument("--build", action="store_true", help="run no test")
    parser.add_argument("tests", nargs="*", default=TESTS, metavar="TEST")
    options = parser.parse_args(arguments)
    compiler, levels = find_compiler(), usable_levels()[:1]
    if compiler is None or not levels:
        why = "no C++ compiler" if compiler is None else "no library is made for this CPU"
        print(f"sanitized tests are skipped: {why}")
        return 0
    try:
        build(targets(FOLDER, levels, FLAGS), say_on_terminal)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if options.build:
        return 0
    # What a sanitizer says as it ends the process is not to be captured.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys"]
    plugin = ["-p", "tests.sanitized", "--timeout", "600"]
    done = subprocess.run(
        [*command, *plugin, *options.tests], cwd=ROOT, env=environment(compiler), check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
