"""Entry point of `kvmesh` and `python -m kvmesh.cli`.

A command's module is imported only when the command runs, so that `kvmesh health` needs only
grpcio.
Tests: tests/unit/cli/test_main.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvmesh.core.interrupts import ended_when_interrupted

with ended_when_interrupted():
    import difflib
    import importlib

    from kvmesh.core.errors import KvMeshError

COMMANDS = {
    "up": "start a local stack: Redis, control plane, workers, gateway",
    "chat": "chat with the model of a running stack",
    "top": "show workers and requests live in the terminal",
    "fleet": "list workers; cordon or drain a worker, or change its role",
    "group": "set up, scale, upgrade and remove groups of workers",
    "adapter": "load, list and remove LoRA adapters while requests run",
    "pool": "show hot prefixes, the workers that hold them, and copies",
    "events": "show the KV events of a worker or of vllm serve",
    "bench": "measure latency, throughput and goodput of a running stack",
    "doctor": "check this machine and a running stack, and say what to fix",
    "health": "check the gRPC health of one service; exit code 0: healthy",
    "proof": "print the header that grpcurl needs to call a service of a mesh with a secret",
    "certs": "create a development CA and certificates for all services",
    "keys": "create, list and revoke API keys; set limits of tenants",
    "profile": "measure the costs of a model on this machine, for plan and simulate",
    "plan": "find the routing threshold and the split into prefill and decode instances",
    "simulate": "replay a trace through the policies, with modelled engines and links",
}

OWN_PARSERS = ("up", "chat", "top", "bench", "doctor", "profile")
"""Commands with a separate module of flags, `<name>_flags`: help and wrong usage load nothing
else."""

EXTRAS = {"events": "events", "plan": "sim", "simulate": "sim", "profile": "local,sim"}
"""Extras of the distribution that a command needs; `local` for all other commands."""

USAGE_ERROR = 2
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

NOBODY_READS = 141
"""Exit code if the reader of the output has closed it (SIGPIPE), as in shells."""


def _overview() -> str:
    rows = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
    return (
        f"usage: kvmesh <command> [options]\n\ncommands:\n{rows}\n\n"
        "`kvmesh <command> --help` explains a command's flags. Every flag can be set by an\n"
        "environment variable: --num-blocks is KVMESH_NUM_BLOCKS. `kvmesh --version` prints the\n"
        "version.\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"kvmesh {_version()}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"kvmesh: there is no command {name!r}; {_advice(name)}", file=sys.stderr)
        return USAGE_ERROR
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        print(f"kvmesh {name}: stopped", file=sys.stderr)
        return INTERRUPTED


def _version() -> str:
    metadata = importlib.import_module("importlib.metadata")  # half of all that `--help` loads
    try:
        return str(metadata.version("kvmesh"))
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


def _advice(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"did you mean `kvmesh {near[0]}`? " if near else ""
    return f"{meant}`kvmesh --help` lists all"


def _run(name: str, rest: Sequence[str]) -> int:
    try:
        with ended_when_interrupted():
            # gRPC reads this when it is loaded. With its fork handlers, each start of a process
            # would print a useless message on stderr.
            config = importlib.import_module("kvmesh.core.config")
            config.default_environment({"GRPC_ENABLE_FORK_SUPPORT": "0"})
            if name in OWN_PARSERS:
                importlib.import_module(f"kvmesh.cli.{name}_flags").parser().parse_args(rest)
            command = importlib.import_module(f"kvmesh.cli.{name}")
        code: int = command.main(rest)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (error.name or "kvmesh").split(".")[0] == "kvmesh":
            raise
        extra = EXTRAS.get(name, "local")
        print(
            f"kvmesh {name} needs the package {error.name}: "
            f"pip install 'kvmesh[{extra}]', or '.[{extra}]' in a checkout",
            file=sys.stderr,
        )
        return USAGE_ERROR
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does. The rest of the output is discarded, so
        # that the interpreter does not complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except KvMeshError as error:
        print(f"kvmesh {name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"kvmesh {name}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
