"""The shape of a connected socket below `FrameSocket`. Tests: tests/contract/test_channels.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Wire(Protocol):
    """What is used of a socket; TLS has the same shape (`tls.py`)."""

    def fileno(self) -> int:
        """Descriptor, to wait on."""
        ...

    def sendmsg(
        self,
        buffers: Iterable[memoryview | bytes],
        ancdata: list[tuple[int, int, bytes]],
        flags: int,
    ) -> int:
        """Gathers; returns how many bytes went out."""
        ...

    def recvmsg_into(
        self, buffers: Iterable[memoryview], ancbufsize: int, flags: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        """Scatters; returns how many bytes came in first, then ancillary data."""
        ...

    def shutdown(self, how: int) -> None:
        """Wakes everybody who waits."""
        ...

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """As of a socket."""
        ...

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """As of a socket."""
        ...

    def setblocking(self, flag: bool) -> None:
        """As of a socket."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...
