"""Which host this is. Tests: tests/unit/transfer/test_memory.py."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Identity of the running host, new with every boot; empty where it is not known.

    Containers of one host have the same: whether a socket path is visible shows when it is tried.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
