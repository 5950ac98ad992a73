"""The file and the table of a benchmark, the same for all of them."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvmesh.cli.bench_report import command_line, git_commit, machine, versions, write_result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """What a number was to reach.

    Attributes:
        at_most: the goal is an upper bound.
    """

    name: str
    value: float | None
    goal: float
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """None when it was not measured."""
        if self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def as_row(self) -> Row:
        """For the file."""
        sign = "<=" if self.at_most else ">="
        value = None if self.value is None else round(self.value, 4)
        return {"name": self.name, "value": value, "goal": f"{sign} {self.goal}", "met": self.met}


def spread(values: Sequence[float], digits: int = 3) -> Row:
    """Smallest, middle and largest of repeated measurements."""
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
_T95 |= {12: 2.18, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.00}
"""Student's t for a two-sided 95 % interval, by degrees of freedom."""


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; 0 for one value."""
    freedom = len(values) - 1
    if not freedom:
        return 0.0
    scale = _T95[max(known for known in _T95 if known <= freedom)]
    return scale * statistics.stdev(values) / math.sqrt(len(values))


def document(
    rows: Sequence[Row],
    targets: Sequence[Target],
    seed: int,
    notes: Sequence[str],
    peers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """A result with all that is needed to run it again.

    Args:
        peers: versions of other systems that were measured, see `peer_versions`.
    """
    return {
        "command": command_line(["python", "-m", *_module()], sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "machine": machine(),
        "versions": versions() | dict(peers),
        "seed": seed,
        "rows": list(rows),
        "targets": [target.as_row() for target in targets],
        "notes": list(notes),
    }


def joined(result: dict[str, Any], path: Path, name: str) -> dict[str, Any]:
    """A result in parts: with the rows that its file has of other values in the column `name`.

    Rows of another commit are not kept. The file tells the commands of all parts.
    """
    if not path.exists():
        return result
    earlier = json.loads(path.read_text())
    measured = {row[name] for row in result["rows"]}
    rows = [row for row in earlier["rows"] if row[name] not in measured]
    if not rows or earlier["commit"] != result["commit"]:
        return result
    command = f"{earlier['command']} && {result['command']}"
    return {**result, "command": command, "rows": [*rows, *result["rows"]]}


def _module() -> list[str]:
    return [f"benchmarks.{Path(sys.argv[0]).stem}"]


def save(result: Mapping[str, Any], path: Path) -> None:
    """Writes the file, and a table beside it."""
    write_result(result, markdown(result), path)


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    where = result["machine"]
    lines = [
        f"`{result['command']}`",
        "",
        f"{result['date']}, commit {result['commit'] or 'unknown'}, {where['processor']},",
        f"{where['cores']} cores, {where['system']}",
        "",
        *table(result["rows"]),
        "",
        *table(result["targets"]),
        "",
        *(f"- {note}" for note in result["notes"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows with the same keys as a Markdown table; spreads become min/median/max."""
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " / ".join(f"{value[name]:g}" for name in ("min", "median", "max"))
    if value is None:
        return "–"
    return str(value)
