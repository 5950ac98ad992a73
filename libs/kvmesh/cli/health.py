"""`kvmesh health`: the gRPC health check as an exit code, for container health checks.

It needs only grpcio: the health protocol's two messages are small enough to parse by hand.
Tests: tests/unit/cli/test_health.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvmesh.cli.flags import add_flag, new_parser, positive
from kvmesh.cli.https import trust

SERVING = "SERVING"
_ADDRESS = re.compile(r"\S+:\d{1,5}")

CHECK = "/grpc.health.v1.Health/Check"
"""The gRPC method; an empty message asks for the state of the whole server."""
# HealthCheckResponse with `status` (field 1, varint) as the only field; 0 is left out on the wire.
_ANSWERS = {b"": "UNKNOWN", b"\x08\x01": SERVING, b"\x08\x02": "NOT_SERVING"}


@dataclass(frozen=True, slots=True)
class HealthTls:
    """PEM files for a TLS port; `cert` and `key` if the service requires a client certificate."""

    ca: str = ""
    cert: str = ""
    key: str = ""


def _open(target: str, tls: HealthTls) -> grpc.Channel:
    options = (("grpc.enable_http_proxy", 0),)
    if not tls.ca:
        return grpc.insecure_channel(target, options=options)
    ca, key, cert = (
        Path(name).read_bytes() if name else None for name in (tls.ca, tls.key, tls.cert)
    )
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def check_health(target: str, timeout_s: float, tls: HealthTls | None = None) -> str:
    """Asks `host:port` for the state of its server.

    Returns:
        `SERVING`, `NOT_SERVING`, `UNKNOWN`, or the gRPC status of a call that failed.
    """
    with _open(target, tls or HealthTls()) as channel:
        # No serializers: an empty HealthCheckRequest (the whole server) is no bytes at all.
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK)
        try:
            return _ANSWERS.get(check(b"", timeout=timeout_s), "UNKNOWN")
        except grpc.RpcError as error:
            return _status_of(error)


def _expected(tls: HealthTls) -> str:
    """Returns the kind of connection that a running service may expect instead."""
    return "not with TLS of this CA" if tls.ca else "with TLS (--tls-ca, --tls-cert, --tls-key)"


def _status_of(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)  # gRPC's call errors are also calls
    return error.code().name


def main(argv: Sequence[str]) -> int:
    """Checks one service; returns exit code 0 if it is serving, else 1."""
    parser = new_parser(
        "kvmesh health",
        "Checks the gRPC health of a service. Exit code 0: serving; 1: not serving or no answer.",
        "example: kvmesh health 127.0.0.1:7001",
    )
    parser.add_argument("target", metavar="HOST:PORT")
    add_flag(parser, "--timeout", 3.0, "timeout in seconds", kind=positive)
    add_flag(parser, "--tls-ca", "", "CA file (PEM) for a service that uses TLS")
    add_flag(parser, "--tls-cert", "", "client certificate file (PEM), if the service requires one")
    add_flag(parser, "--tls-key", "", "private key file (PEM) of the certificate")
    arguments = parser.parse_args(argv)
    if not arguments.target.startswith("unix:") and not _ADDRESS.fullmatch(arguments.target):
        parser.error(f"{arguments.target!r} is not HOST:PORT, such as 127.0.0.1:7001")
    tls = HealthTls(arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if tls.ca:
        trust(tls.ca)  # for its error message about the file; gRPC only reports no answer
    try:
        state = check_health(arguments.target, arguments.timeout, tls)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    hint = "" if state != "UNAVAILABLE" else f"; nobody listens there, or {_expected(tls)}"
    print(f"{arguments.target} {state}{hint}", file=sys.stdout if state == SERVING else sys.stderr)
    return 0 if state == SERVING else 1
