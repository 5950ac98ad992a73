"""Tables of the documents that are taken from the results, so that they cannot say something else.

`make bench-summary` writes them between `<!-- measured: NAME -->` and `<!-- end of measured -->`.
Tests: tests/unit/benchmarks/test_quoted_tables.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import policies_ablation, policies_grid, policies_joint
from benchmarks.result import ROOT, Row, table

Result = Mapping[str, Any]

END = "<!-- end of measured -->\n"


def with_tables(text: str, results: Mapping[str, Result]) -> str:
    """A document with fresh tables; one whose benchmark was not run stays.

    Args:
        results: by the name of the benchmark.
    """
    for name, (benchmark, rows) in _TABLES.items():
        begin = f"<!-- measured: {name} -->\n"
        if begin in text and benchmark in results:
            before, rest = text.split(begin)
            fresh = "\n".join(table(rows(results[benchmark])))
            text = f"{before}{begin}{fresh}\n{END}{rest.split(END, 1)[1]}"
    return text


def _joint(result: Result) -> list[Row]:
    """Loads and systems of the experiment on joint dispatch."""
    runs = [row for row in result["rows"] if row["experiment"] == policies_joint.NAME]
    return [_joint_row(row) for row in runs]


def _joint_row(row: Mapping[str, Any]) -> Row:
    load, _, system = row["run"].rpartition(" ")
    return {
        "load": load,
        "policy": f"`{system}`",
        "goodput/s": f"{row['goodput/s']:.2f}",
        "mean TTFT": f"{row['TTFT mean']:.3f} s",
        "TTFT p99": f"{row['TTFT p99']:.2f} s",
        "hits": f"{100 * row['hits']:.1f} %",
        "CV": f"{row['CV']:.2f}",
        "tokens moved": f"{row['moved tokens'] / 1e6:.2f} M",
    }


def _grid(result: Result) -> list[Row]:
    """A row for each cell."""
    shown = []
    for cell in policies_grid.compare(result["rows"]):
        limits = f"{cell.tpot_ms} ms" + (f", x{cell.ttft_share:g}" if cell.ttft_share != 1 else "")
        shown.append(
            {
                "trace": cell.trace.replace("_", " "),
                "requests/s": f"{cell.rate:g}",
                "limits": limits,
                "goodput/s": f"{cell.goodput:.2f}",
                "at most": f"{cell.bound:.2f}",
                "best other": cell.best,
                "over it": f"{cell.ratio:.2f} ± {cell.noise:.2f}",
                "over the best mixed": f"{cell.over_mixed:.2f}",
                "over roles 6:4": f"{cell.over_roles:.2f}",
                "ITL p99, best other's": f"{1000 * cell.itl_s:.0f} ms, "
                f"{1000 * cell.best_itl_s:.0f} ms",
            }
        )
    return shown


def _fleet(result: Result) -> list[Row]:
    """An event, and what it did to the fleet with each engine."""
    engines = {row["engine"]: None for row in result["rows"]}
    told = {
        engine: _fleet_events([row for row in result["rows"] if row["engine"] == engine])
        for engine in engines
    }
    events = {event: None for of_engine in told.values() for event in of_engine}
    return [
        {
            "event under load": event,
            **{
                f"{engine} engine": of_engine.get(event, "not run")
                for engine, of_engine in told.items()
            },
        }
        for event in events
    ]


def _fleet_events(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    parts: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        parts[row["part"]][row["case"]] = row
    events = {}
    if calm := parts["isolation"]:
        ratios = [row["ratio"] for row in calm.values()]
        events["ten times the load in another group"] = (
            f"p99 of this one {min(ratios):.2f} to {max(ratios):.2f} of alone"
        )
    if changes := parts["upgrade"]:
        answers, failed, wrong = (
            sum(row[key] for row in changes.values()) for key in ("answers", "failed", "wrong")
        )
        events[
            "three groups set up, scaled, upgraded; the scheduler killed in each of "
            f"{len(changes)} states"
        ] = f"{answers} requests, {failed} failed, {wrong} answered by two checkpoints"
    for case, row in parts["substitute"].items():
        events[f"one worker killed; {_PLACES[case]}"] = (
            f"full capacity after {row['full capacity s']:.2f} s; {row['failed']} requests lost"
        )
    for case, row in parts["ejection"].items():
        events[f"a worker {_FAULTS[case]}"] = (
            f"ejected after {row['ejected s']:.2f} s; requests that met it: {row['met it']}; "
            f"p99 of the others {row['ratio']:.2f} of before"
        )
    if whole := parts["restart"].pop("all", None):
        pause_ms = max(row["longest pause ms"] for row in parts["restart"].values())
        events["two of each service, all workers, Redis and its replica restarted in turn"] = (
            f"{whole['answers']} streams, {whole['failed or wrong']} failed or wrong; "
            f"longest pause {pause_ms / 1000:.1f} s"
        )
    return events


_PLACES = {
    "spare": "a spare takes its place",
    "empty": "an empty spare",
    "return": "its own restart",
    "flip": "a worker of the other role",
    "slack": "a worker of another group",
    "process": "a new process",
}

_FAULTS = {
    "hang": "hangs",
    "slow 10": "is ten times slower",
    "nan": "computes NaN",
    "killed": "is killed",
    "cut off": "is cut off from the scheduler",
}


def _variants(experiment: str) -> Callable[[Result], list[Row]]:
    def rows(result: Result) -> list[Row]:
        names = ("experiment", "run")
        found = {
            row["run"]: {key: value for key, value in row.items() if key not in names}
            for row in result["rows"]
            if row["experiment"] == experiment
        }
        return [
            {
                "variant": label,
                "over the default": f"{statistics.geometric_mean(ratios):.3f}",
                "least of a cell": f"{min(ratios):.3f}",
                "most of a cell": f"{max(ratios):.3f}",
            }
            for label, ratios in policies_ablation.over_first(found).items()
        ]

    return rows


_TABLES: Mapping[str, tuple[str, Callable[[Result], list[Row]]]] = {
    "joint dispatch": ("policies", _joint),
    "fleet": ("fleet", _fleet),
    "grid": ("policies_grid", _grid),
    "ablation": ("policies_ablation", _variants("Ablation")),
    "sensitivity": ("policies_ablation", _variants("Sensitivity")),
}

DOCUMENTS = (
    ROOT / "docs/adr/0018-joint-dispatch.md",
    ROOT / "docs/evaluation.md",
    ROOT / "docs/groups.md",
)
"""Where the tables are."""
