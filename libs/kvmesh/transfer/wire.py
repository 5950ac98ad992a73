"""The shape of a connected socket below `FrameSocket`. Tests: tests/contract/test_channels.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Wire(Protocol):
    """The socket methods that `FrameSocket` uses; TLS implements them, too (`tls.py`)."""

    def fileno(self) -> int:
        """Returns the descriptor, to wait on."""
        ...

    def sendmsg(
        self,
        buffers: Iterable[memoryview | bytes],
        ancdata: list[tuple[int, int, bytes]],
        flags: int,
    ) -> int:
        """Sends from several buffers; returns the number of bytes sent."""
        ...

    def recvmsg_into(
        self, buffers: Iterable[memoryview], ancbufsize: int, flags: int
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        """Receives into several buffers; returns the number of bytes, then ancillary data."""
        ...

    def shutdown(self, how: int) -> None:
        """Shuts the socket down, which wakes all waiters."""
        ...

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """See `socket.setsockopt`."""
        ...

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """See `socket.getsockopt`."""
        ...

    def setblocking(self, flag: bool) -> None:
        """See `socket.setblocking`."""
        ...

    def close(self) -> None:
        """Frees the socket."""
        ...
