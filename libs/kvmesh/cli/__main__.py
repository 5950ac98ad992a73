"""Entry point of `kvmesh` and `python -m kvmesh.cli`.

A command's module is imported when it is asked for, so that `kvmesh health` needs grpcio only.
Tests: tests/unit/cli/test_main.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kvmesh.core.errors import KvMeshError

COMMANDS = {
    "up": "start a local stack: Redis, control plane, workers, gateway",
    "chat": "talk to the model of a running stack",
    "top": "workers and requests, live, in the terminal",
    "fleet": "list the workers; cordon, drain or give another role to one",
    "pool": "show hot prefixes, who holds them and what was copied",
    "bench": "measure latency, throughput and goodput of a running stack",
    "doctor": "say what is wrong with this machine or a running stack",
    "health": "ask one service for its gRPC health; the exit code is the answer",
    "certs": "make a development CA and certificates for all services",
    "keys": "make, list and revoke API keys; set the limits of tenants",
    "profile": "measure a model on this machine, for plan and simulate",
    "plan": "search the routing threshold and the split of prefill and decode instances",
    "simulate": "replay a trace against the policies, with modelled engines and links",
}

EXTRAS = {"plan": "sim", "simulate": "sim"}
"""Extra of the distribution that a command needs; `local` for all others."""

USAGE_ERROR = 2


def _overview() -> str:
    rows = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    return (
        f"usage: kvmesh <command> [options]\n\ncommands:\n{rows}\n\n"
        "`kvmesh <command> --help` explains a command's flags. Every flag has an environment\n"
        "twin: --num-blocks is KVMESH_NUM_BLOCKS.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"kvmesh: unknown command {name!r}\n\n{_overview()}", end="", file=sys.stderr)
        return USAGE_ERROR
    try:
        command = importlib.import_module(f"kvmesh.cli.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "kvmesh").split(".")[0] == "kvmesh":
            raise
        print(
            f"kvmesh {name} needs the package {error.name}: "
            f"pip install 'kvmesh[{EXTRAS.get(name, 'local')}]'",
            file=sys.stderr,
        )
        return USAGE_ERROR
    try:
        code: int = command.main(rest)
    except KvMeshError as error:
        print(f"kvmesh {name}: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
