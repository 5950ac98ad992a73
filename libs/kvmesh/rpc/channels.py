"""gRPC channels and servers with the options that all of KVMesh uses.

Tests: tests/integration/test_rpc.py.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvmesh.core.config import option
from kvmesh.core.errors import ConfigError
from kvmesh.core.mesh_secret import MeshSecret
from kvmesh.rpc.callers import KnownCallers
from kvmesh.rpc.damaged import DamagedRequests
from kvmesh.rpc.membership import MemberChannel, MembersOnly
from kvmesh.rpc.tls_files import check_trust, load_tls_files

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Maximum bytes of a message. A prompt of a million tokens fits; KV is never sent this way."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Long-lived streams must notice a peer that vanished without closing its socket.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Reconnect fast: a restarted peer should be found within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels to one peer must not share a broken connection's state across tests or restarts.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS files. If all are empty, connections are plain text."""

    cert: str = option("", "file with the certificate chain (PEM) of this service")
    key: str = option("", "file with the private key (PEM) of the certificate")
    ca: str = option(
        "",
        "file with the CA (PEM) that must have signed the peers' certificates; set it on "
        "both sides for mTLS",
    )
    verify_callers: bool = option(
        True, "if a CA is set, require a client certificate that it signed"
    )


@dataclass(frozen=True, slots=True)
class PeerTls(TlsConfig):
    """TLS files of a service that also calls others of its mesh."""

    peer_name: str = option(
        "",
        "name expected in the certificates of called services; empty: the address that is called",
    )


@dataclass(frozen=True, slots=True)
class MeshAccess:
    """The credentials that a process shows to the services of its mesh.

    Attributes:
        tls: certificates; plain text without a CA.
        secret: proves that the caller belongs to the mesh; None in a mesh without a secret.
    """

    tls: PeerTls = field(default_factory=PeerTls)
    secret: MeshSecret | None = None


NO_ACCESS = MeshAccess()
"""Plain text, without credentials."""


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def open_channel(target: str, access: MeshAccess = NO_ACCESS) -> grpc.aio.Channel:
    """Opens a channel to `host:port`."""
    channel = _open(target, access.tls)
    return channel if access.secret is None else MemberChannel(channel, access.secret)


def _open(target: str, tls: PeerTls) -> grpc.aio.Channel:
    if not tls.ca:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))
    named = [("grpc.ssl_target_name_override", tls.peer_name)] if tls.peer_name else []
    return grpc.aio.secure_channel(target, credentials, options=[*_OPTIONS, *named])


def make_server(
    *,
    share_port: bool = False,
    callers: frozenset[str] = frozenset(),
    secret: MeshSecret | None = None,
    public: Collection[str] = (),
) -> grpc.aio.Server:
    """Makes a server without ports or servicers.

    Args:
        share_port: another process with this option may listen on the same port.
        callers: names in certificates that may call; empty admits every caller.
        secret: callers must prove that they hold it; None admits every caller.
        public: full names of services that need no proof; read at each call.
    """
    options = [*_OPTIONS, ("grpc.so_reuseport", int(share_port))]
    interceptors: list[grpc.aio.ServerInterceptor] = [DamagedRequests()]
    if callers:
        interceptors.insert(0, KnownCallers(callers))
    if secret is not None:
        interceptors.insert(0, MembersOnly(secret, public))
    return grpc.aio.server(options=options, interceptors=interceptors)


def bind_server(server: grpc.aio.Server, host: str, port: int, tls: TlsConfig | None = None) -> int:
    """Adds a port (0 picks a free one) and returns its number.

    Raises:
        ConfigError: the port is taken, or a TLS file cannot be used; the message says which.
    """
    address = f"{host}:{port}"
    if tls is not None and tls.cert:
        # gRPC reports a wrong file like a port that is taken, so the files are checked first.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_tls_files(context, tls.cert, tls.key, tls.ca, "server.tls")
        check_trust(tls.cert, tls.key, tls.ca, "server.tls")
    try:
        if tls is None or not tls.cert:
            return server.add_insecure_port(address)
        key, cert = _read(tls.key) or b"", _read(tls.cert) or b""
        ca = _read(tls.ca) if tls.verify_callers else None
        credentials = grpc.ssl_server_credentials([(key, cert)], ca, ca is not None)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is taken or the address is not this host's; "
            "choose another with --server.port"
        ) from error
