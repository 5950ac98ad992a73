"""`python -m kvmesh.kernels.prebuild`: compiles the C++ libraries of a worker into the cache.

For images whose file system cannot be written at run time. Tests: tests/unit/kernels/test_host.py.
"""

from __future__ import annotations

import sys

from kvmesh.kernels.host_library import load_host_library
from kvmesh.telemetry.logs import configure_logging
from kvmesh.transfer.native import load_native


def main() -> int:
    """Compiles what is not there yet; 1 if something could not be compiled."""
    configure_logging("prebuild", fmt="text")  # says why
    return 0 if load_host_library() is not None and load_native() is not None else 1


if __name__ == "__main__":
    sys.exit(main())
