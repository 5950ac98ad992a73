"""Formats a benchmark's result for people and for files.

Tests: tests/unit/cli/test_bench_report.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmesh.core.cores import usable_cores

if TYPE_CHECKING:
    from rich.table import Table

_PACKAGES = ("kvmesh", "torch", "grpcio", "aiohttp", "uvloop")
_ROWS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
_COLUMNS = ("mean", "p50", "p90", "p99")


def machine() -> dict[str, Any]:
    """Returns the description of this machine for the result."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": usable_cores(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str]:
    """Returns the versions of Python and relevant packages, without packages not installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line(program: Sequence[str], arguments: Sequence[str]) -> str:
    """Returns the command that made a result, to repeat it.

    Absolute paths are shortened, also behind `name=`.
    """
    return shlex.join([*program, *map(_shortened, arguments)])


def _shortened(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    path = Path(value)
    return f"{name}{equals}.../{path.name}" if path.is_absolute() else argument


def git_commit(root: Path) -> str:
    """Returns the checkout's commit, with `-dirty` if files differ; empty outside a checkout.

    Changed files in bench/results do not count.
    """
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = commit and _git(root, "status", "--porcelain", "-uno", "--", ".", ":!bench/results")
    return f"{commit}-dirty" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    """Returns git's output; empty if it fails."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def latency_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns one row per latency: its name, and the columns of the table in ms."""
    return [
        {"latency": title, **{column: result[f"{column}_{name}_ms"] for column in _COLUMNS}}
        for title, name in _ROWS
    ]


def latency_table(result: Mapping[str, Any]) -> Table:
    """Returns the latencies as a table for the terminal."""
    # Imported here: benchmarks use this module where torch but not rich is installed.
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ms")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in latency_rows(result):
        table.add_row(row["latency"], *(f"{row[column]:.1f}" for column in _COLUMNS))
    return table


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """Returns counts and rates as text lines."""
    lines = [
        (
            f"{result['completed']} completed, {result['refused']} refused, "
            f"{result['errors']} errors in {result['duration']:.1f} s"
        ),
        (
            f"{result['request_throughput']:.2f} requests/s, "
            f"{result['output_throughput']:.1f} output tokens/s, "
            f"{result['total_token_throughput']:.1f} tokens/s in all"
        ),
    ]
    if "request_goodput" in result:
        limits = ", ".join(f"{k} <= {v:g} ms" for k, v in result["goodput_limits"].items())
        lines.append(f"goodput {result['request_goodput']:.2f} requests/s ({limits})")
    return lines


def markdown(result: Mapping[str, Any]) -> str:
    """Returns the result as a Markdown page."""
    where = result["machine"]
    lines = [
        "# Serving benchmark",
        "",
        f"`{result['command']}`",
        "",
        (
            f"{result['date']}, commit {result['commit'] or 'unknown'}, {where['processor']}, "
            f"{where['cores']} cores, model {result['model']}."
        ),
        "",
        (
            f"{result['num_requests']} requests, {result['request_rate']:g} per second "
            f"(Poisson, seed {result['seed']}), {result['input_tokens']} tokens in, "
            f"{result['output_tokens']} out."
        ),
        "",
        *(f"- {line}" for line in summary_lines(result)),
        "",
        "| ms | " + " | ".join(_COLUMNS) + " |",
        "|---" * (1 + len(_COLUMNS)) + "|",
    ]
    for row in result["rows"]:
        cells = " | ".join(f"{row[column]:.1f}" for column in _COLUMNS)
        lines.append(f"| {row['latency']} | {cells} |")
    return "\n".join([*lines, "", *target_table(result["targets"])]) + "\n"


def target_table(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a Markdown table: what was to be reached, and whether it was."""
    lines = ["| target | value | goal | met |", "|---|---|---|---|"]
    for target in targets:
        met = "yes" if target["met"] else "no"
        lines.append(f"| {target['name']} | {target['value']:g} | {target['goal']} | {met} |")
    return lines


def write_result(result: Mapping[str, Any], page: str, path: Path) -> None:
    """Writes the result as JSON, and its Markdown page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(page)
