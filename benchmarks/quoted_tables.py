"""Tables of the documents that are taken from the results, so that they cannot say something else.

`make bench-summary` writes them between `<!-- measured: NAME -->` and `<!-- end of measured -->`.
Tests: tests/unit/benchmarks/test_quoted_tables.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
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
                "ITL p99, best other's": f"{1000 * cell.itl_s:.0f} ms, "
                f"{1000 * cell.best_itl_s:.0f} ms",
            }
        )
    return shown


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
    "grid": ("policies_grid", _grid),
    "hybrids": ("policies_hybrids", _grid),
    "ablation": ("policies_ablation", _variants("Ablation")),
    "sensitivity": ("policies_ablation", _variants("Sensitivity")),
}

DOCUMENTS = (ROOT / "docs/adr/0018-joint-dispatch.md", ROOT / "docs/evaluation.md")
"""Where the tables are."""
