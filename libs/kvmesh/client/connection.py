"""Channel options, TLS and call metadata, shared by both clients.

Servers inside the mesh use `rpc/channels.py`; these options suit a client that reaches a gateway
through any proxy. Tests: tests/unit/client/test_connection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from kvmesh.core.errors import ConfigError

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.max_send_message_length", 32 * 1024 * 1024),
    # Only while a call runs, and rarely: a proxy cuts clients that ping too often.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # The client's own retry loop must see every failure; gRPC's would hide the server's refusals.
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS to the gateway. Without arguments, the client trusts the system's authorities.

    Attributes:
        ca: PEM file of the authority that signed the gateway's certificate.
        cert: PEM file that the client shows (mutual TLS); needs `key`.
        key: PEM file of the key of `cert`.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files.

        Raises:
            ConfigError: a file cannot be read, or one of `cert` and `key` is missing.
        """
        if (self.cert is None) != (self.key is None):
            raise ConfigError("mutual TLS needs both cert and key")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


StubT = TypeVar("StubT")


class Gateways(Generic[StubT]):
    """Stubs of the gateways that a client knows. All calls go to one of them until it fails.

    Args:
        stubs: one per address.
        first: index of the first one to use; it should differ between clients.
    """

    def __init__(self, stubs: Sequence[StubT], first: int) -> None:
        self._stubs = stubs
        self._now = first % len(stubs)

    @property
    def stub(self) -> StubT:
        """The stub to call now."""
        return self._stubs[self._now]

    def leave(self, stub: StubT) -> None:
        """Switches to the next gateway after a failed call, unless another call already has."""
        if stub is self.stub:
            self._now = (self._now + 1) % len(self._stubs)


def _read(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata for every call."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
