"""`make kernel-registers`: what the assembler gives each kernel at the sizes of real models, on
every architecture, with no device. Fails where more of a thread lies in memory than is known.

That nothing does on sm_90 is a test as well, of whole steps: compiled_steps.py.
"""

from __future__ import annotations

import argparse
import sys

from tests.unit.kernels.no_device import SHARED_MEMORY_BYTES, device
from tests.unit.kernels.real_launches import LAUNCHES

MOST_STACK_BYTES = 64
"""Of a thread, on any architecture: prompts with heads of 128 or 256, and scans of states."""


def main() -> int:
    """Writes a row per kernel and sizes: registers / stack bytes / shared KiB by architecture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED_MEMORY_BYTES))
    parser.add_argument("--only", default="", help="launches whose name contains this")
    options = parser.parse_args()
    sys.stdout.write("| launch | kernel | " + " | ".join(f"sm_{a}" for a in options.arch) + " |\n")
    sys.stdout.write("|---" * (len(options.arch) + 2) + "|\n")
    most = 0
    for name in (each for each in LAUNCHES if options.only in each):
        rows: dict[str, list[str]] = {}
        for arch in options.arch:
            with device(arch) as launches:
                LAUNCHES[name]()
            for launch in launches:
                most = max(most, launch.stack_bytes)
                said = f"{launch.registers} / {launch.stack_bytes} / {launch.shared_bytes >> 10}"
                rows.setdefault(launch.kernel, []).append(said)
        for kernel, cells in rows.items():
            sys.stdout.write(f"| {name} | `{kernel}` | {' | '.join(cells)} |\n")
        sys.stdout.flush()
    return 0 if most <= MOST_STACK_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
