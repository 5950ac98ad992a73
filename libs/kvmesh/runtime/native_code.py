"""The C++ libraries that a worker uses. Tests: tests/unit/runtime/test_native_code.py."""

from __future__ import annotations

from kvmesh.runtime.worker_config import EngineSection
from kvmesh.transfer.native import load_native

KERNELS, TRANSFER = "kernels", "transfer"


def native_levels(engine: EngineSection) -> dict[str, str]:
    """The instruction set level of each library that a worker needs; empty if it is missing.

    Args:
        engine: its device decides; kernels are only for CPUs.
    """
    native = load_native()
    levels = {TRANSFER: "" if native is None else native.level}
    if engine.kind == "kvmesh" and engine.device == "cpu":
        # This import loads torch, which the engine has loaded already.
        from kvmesh.kernels.host_library import load_host_library  # noqa: PLC0415

        host = load_host_library()
        levels[KERNELS] = "" if host is None else host.level
    return levels
