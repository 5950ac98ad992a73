"""A connection's way out that keeps what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeTransport:
    """Looks like a transport to those that write.

    Attributes:
        unsent: bytes that the peer has not taken, as the test says.
        sent: what was written, piece by piece.
    """

    unsent: int = 0
    closing: bool = False
    sent: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unsent
