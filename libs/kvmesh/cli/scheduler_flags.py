"""Flags of commands that call the schedulers. Tests: tests/unit/cli/test_scheduler_access.py."""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import add_flag, positive
from kvmesh.cli.stack_state import add_state_flag

DEFAULT_TARGET = "127.0.0.1:7001"


def add_scheduler_flags(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Adds the flags that `scheduler_access.scheduler_access` reads."""
    add_flag(
        parser,
        "--scheduler",
        "",
        f"schedulers, comma-separated; default: those of `kvmesh up`, else {DEFAULT_TARGET}",
        metavar="HOST:PORT",
    )
    add_state_flag(parser)
    add_flag(parser, "--timeout", timeout_s, "timeout in seconds", kind=positive)
    text = (
        "file with the shared secret of the mesh; default: the secret of the stack of `kvmesh up`"
    )
    add_flag(parser, "--secret-file", "", text, metavar="FILE")
    add_flag(parser, "--tls-ca", "", "CA file (PEM) for schedulers that use TLS")
    add_flag(
        parser, "--tls-cert", "", "client certificate file (PEM), if the schedulers require one"
    )
    add_flag(parser, "--tls-key", "", "private key file (PEM) of the certificate")
