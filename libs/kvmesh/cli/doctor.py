"""`kvmesh doctor`: reports problems of this machine or a running stack, and what to do.

Tests: tests/unit/cli/test_doctor.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvmesh.cli import machine_checks, stack_checks
from kvmesh.cli.doctor_flags import parser
from kvmesh.cli.findings import Finding, Level
from kvmesh.cli.https import trust
from kvmesh.cli.model_folder import embedded_models
from kvmesh.cli.preflight import free_memory_bytes
from kvmesh.cli.screen import terminal
from kvmesh.cli.stack_state import (
    CHECKOUT,
    DEFAULT_STATE,
    gateway_url,
    read_description,
)
from kvmesh.core.config import environment
from kvmesh.core.cores import usable_cores
from kvmesh.metadata.server_binary import find_redis_binary

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def main(argv: Sequence[str]) -> int:
    """Prints one line per check; exit code 1 if any failed."""
    arguments = parser().parse_args(argv)
    state = Path(arguments.state_dir) if arguments.state_dir else DEFAULT_STATE
    embedded = embedded_models(CHECKOUT)
    model = Path(arguments.model) if arguments.model else (embedded[0] if embedded else None)
    findings = _machine(model)
    url, tls = gateway_url(arguments), trust(arguments.tls_ca)
    gateway = stack_checks.check_gateway(url, tls, must_run=bool(arguments.url))
    findings += asyncio.run(_network(gateway, arguments.redis_url, state))
    terminal().print(table_of(findings))
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0


def _machine(model: Path | None) -> list[Finding]:
    return [
        machine_checks.check_python(tuple(sys.version_info[:3])),
        *machine_checks.check_packages(),
        machine_checks.check_cores(usable_cores(), environment("OMP_NUM_THREADS")),
        machine_checks.check_memory(free_memory_bytes()),
        machine_checks.check_native(),
        machine_checks.check_products(),
        machine_checks.check_congestion_control(),
        machine_checks.check_vllm(model),
        machine_checks.check_model(model),
    ]


async def _network(
    gateway: Coroutine[Any, Any, Finding], redis_url: str, state: Path
) -> list[Finding]:
    findings = [
        await stack_checks.check_redis(redis_url, find_redis_binary()),
        await gateway,
    ]
    stack = read_description(state)
    if stack is not None:
        findings += await stack_checks.check_members(stack, state / "logs")
    return findings


def table_of(findings: Sequence[Finding]) -> Table:
    """Returns the findings as a table for the terminal."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = finding.detail + (f"\n-> {finding.remedy}" if finding.remedy else "")
        # `Text`, because brackets in details would be parsed as markup.
        level = Text(finding.level.value, style=_STYLES[finding.level])
        table.add_row(level, Text(finding.subject), Text(text))
    return table
