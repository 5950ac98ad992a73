"""`kvmesh health`: the gRPC health check as an exit code, for container health checks.

Needs grpcio only: the health protocol's two messages are small enough to be read by hand.
Tests: tests/unit/cli/test_health.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc

from kvmesh.cli.flags import add_flag, new_parser

SERVING = "SERVING"

_CHECK = "/grpc.health.v1.Health/Check"
# HealthCheckResponse with `status` (field 1, varint) as the only field; 0 is left out on the wire.
_ANSWERS = {b"": "UNKNOWN", b"\x08\x01": SERVING, b"\x08\x02": "NOT_SERVING"}


def check_health(target: str, timeout_s: float) -> str:
    """Asks `host:port` for the state of its server.

    Returns:
        `SERVING`, `NOT_SERVING`, `UNKNOWN`, or the gRPC status of a call that failed.
    """
    with grpc.insecure_channel(target, options=(("grpc.enable_http_proxy", 0),)) as channel:
        # No serializers: an empty HealthCheckRequest (the whole server) is no bytes at all.
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
        try:
            return _ANSWERS.get(check(b"", timeout=timeout_s), "UNKNOWN")
        except grpc.RpcError as error:
            return _status_of(error)


def _status_of(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)  # every error of a call is also that call
    return error.code().name


def main(argv: Sequence[str]) -> int:
    """Exit code 0 if the service is serving, else 1."""
    parser = new_parser(
        "kvmesh health",
        "Asks a service for its gRPC health. Exit code 0: serving; 1: not serving or no answer.",
        "example: kvmesh health 127.0.0.1:7001",
    )
    parser.add_argument("target", metavar="HOST:PORT")
    add_flag(parser, "--timeout", 3.0, "seconds to wait for the answer", kind=float)
    arguments = parser.parse_args(argv)
    state = check_health(arguments.target, arguments.timeout)
    print(f"{arguments.target} {state}", file=sys.stdout if state == SERVING else sys.stderr)
    return 0 if state == SERVING else 1
