"""Which C++ libraries a worker runs with. Tests: tests/unit/runtime/test_native_code.py."""

from __future__ import annotations

from kvmesh.runtime.worker_config import EngineSection
from kvmesh.transfer.native import load_native

KERNELS, TRANSFER = "kernels", "transfer"


def native_levels(engine: EngineSection) -> dict[str, str]:
    """Level of instructions by library that a worker needs; empty for one that is missing.

    Args:
        engine: where it computes; kernels are for CPUs.
    """
    native = load_native()
    levels = {TRANSFER: "" if native is None else native.level}
    if engine.kind == "kvmesh" and engine.device == "cpu":
        # It imports torch, as this engine has.
        from kvmesh.kernels.host_library import load_host_library  # noqa: PLC0415

        host = load_host_library()
        levels[KERNELS] = "" if host is None else host.level
    return levels
