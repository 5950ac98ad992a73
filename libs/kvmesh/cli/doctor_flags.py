"""Flags of `kvmesh doctor`. Tests: tests/unit/cli/test_doctor.py."""

from __future__ import annotations

import argparse

from kvmesh.cli.flags import add_flag, new_parser
from kvmesh.cli.https import add_ca_flag
from kvmesh.cli.stack_state import add_state_flag, add_url_flag


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all flags."""
    made = new_parser(
        "kvmesh doctor",
        "Checks this machine (Python, packages, Redis, cores, memory, kernel settings, model)\n"
        "and, if a stack runs, its gateway, scheduler and workers. Exit code 1 on any failure.",
        "examples:\n"
        "  kvmesh doctor\n"
        "  kvmesh doctor --url http://gateway:8000 --redis-url redis://127.0.0.1:6379/0",
    )
    add_url_flag(made)
    add_ca_flag(made)
    add_flag(
        made,
        "--redis-url",
        "",
        "URL of a running Redis; default: check the one that `kvmesh up` would start",
    )
    add_flag(made, "--model", "", "model folder; default: the embedded model", metavar="DIR")
    add_state_flag(made)
    return made
