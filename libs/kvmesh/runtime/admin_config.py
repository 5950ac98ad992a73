"""Configuration of the admin port, separate from its HTTP server, which a service may never load.

Tests: tests/integration/test_admin.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, secret
from kvmesh.rpc.channels import TlsConfig


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """The admin port."""

    host: str = option(
        "127.0.0.1", "address of the admin port; an address other than loopback requires a token"
    )
    port: int = option(-1, "admin HTTP port; 0 picks a free one, -1 turns it off")
    socket: str = option(
        "",
        "path of a Unix socket for the same calls; it needs no token, and only its owner "
        "has access",
    )
    token: str = secret("bearer token that callers of the admin port must send")
    token_file: str = option("", "file with the bearer token of the admin port")
    tls: TlsConfig = option(TlsConfig, "")

    @property
    def is_wanted(self) -> bool:
        """Whether a port or a socket is configured."""
        return self.port >= 0 or bool(self.socket)
