"""The identity of this host. Tests: tests/unit/transfer/test_memory.py."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Returns the identity of the running host, new at every boot; empty if unknown.

    Containers of one host share it. Whether they see each other's socket paths shows when one
    tries.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
