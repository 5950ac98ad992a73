"""`kvmesh proof`: prints the header for calls by a tool such as grpcurl to a mesh with a secret.

Tests: tests/integration/test_membership.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from kvmesh.cli.flags import add_flag, new_parser
from kvmesh.cli.stack_secrets import find_secret
from kvmesh.cli.stack_state import add_state_flag
from kvmesh.rpc.membership import MAX_AGE_S, call_proof


def main(argv: Sequence[str]) -> int:
    """Prints the header; exit code 1 without a secret."""
    parser = new_parser(
        "kvmesh proof",
        "Prints the header that proves, for one gRPC method, that its caller holds the mesh's\n"
        f"secret. It is valid for {MAX_AGE_S} seconds. Without --secret-file, it uses the secret\n"
        "of the running stack of `kvmesh up`.",
        "example:\n  kvmesh proof kvmesh.v1.SchedulerService/WatchFleet",
    )
    parser.add_argument("method", metavar="SERVICE/METHOD")
    text = (
        "file with the shared secret of the mesh; default: the secret of the stack of `kvmesh up`"
    )
    add_flag(parser, "--secret-file", "", text, metavar="FILE")
    add_state_flag(parser)
    arguments = parser.parse_args(argv)
    method: str = arguments.method.strip("/")
    if method.count("/") != 1:
        parser.error(f"{arguments.method!r} is not SERVICE/METHOD")
    secret = find_secret(arguments.secret_file, arguments.state_dir)
    if secret is None:
        print(
            "kvmesh proof: there is no secret; start a stack with `kvmesh up`, or name the mesh's "
            "with --secret-file",
            file=sys.stderr,
        )
        return 1
    print(": ".join(call_proof(secret, f"/{method}", time.time())))
    return 0
