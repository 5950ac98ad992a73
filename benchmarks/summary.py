"""What all benchmarks measured last: bench/results/README.md, and what other pages show of it.

Tests: tests/unit/benchmarks/test_summary.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.headline import with_headlines
from benchmarks.quoted_tables import DOCUMENTS, with_tables
from benchmarks.result import RESULTS, ROOT, table

_HEAD = """# What was measured

Each file is one run of one benchmark, whose command, date, commit, machine and versions are in it;
ratios are of values in the same run. The verb in the last column runs it again on your machine and
writes its files; what the command in a file has besides (traces, interpreters of other systems) is
given as `ARGS`, or `TRACES` for the policies. `make bench-summary` then writes this page, and the
tables of other pages that are taken from these files.
"""

VERBS = {
    "fuzz_frames": "bench-fuzz",
    "gateway_ablation": "bench-gateway",
    "gateway_death": "bench-gateway",
    "gateway_journal": "bench-gateway",
    "one_box": "bench-one-box",
    "policies_ablation": "bench-ablation",
    "policies_capacity": "bench-capacity",
    "policies_grid": "bench-grid",
    "policies_million": "bench-million",
    "prefix_fetch": "bench-fetch",
    "long_path": "bench-long-path",
    "prefix_links": "bench-fetch-links",
    "prompt_chain": "bench-chain",
    "prompt_chain_saturated": "bench-chain",
    "prompt_chain_simulated": "bench-chain",
    "prompt_chain_ways": "bench-chain",
    "route_path": "bench-routing",
    "tier_rounds": "bench-tier-load",
    "vllm_serve": "bench-vllm",
}
"""Verbs of the Makefile that are not named as their results are."""


def main() -> None:
    """Writes the page, and the tables of others, from the results that are there."""
    files = sorted(RESULTS.glob("*.json"))
    results = {file.stem: json.loads(file.read_text()) for file in files}
    page = RESULTS / "README.md"
    page.write_text(summary(results))
    readme = ROOT / "README.md"
    readme.write_text(with_headlines(readme.read_text(), results))
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text(), results))
    for written in (page, readme, *DOCUMENTS):
        sys.stdout.write(f"{written.relative_to(Path.cwd())}\n")


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page.

    Args:
        results: by the name of the benchmark.
    """
    overview = [
        {
            "benchmark": f"[{name}]({name}.md)",
            "date": result["date"][:10],
            "commit": result["commit"],
            "targets met": _met(result.get("targets", [])),
            "again": f"`make {VERBS.get(name, f'bench-{name}')}`".replace("_", "-"),
        }
        for name, result in results.items()
    ]
    missed = [
        {"benchmark": name, "target": each["name"], "value": each["value"], "goal": _goal(each)}
        for name, result in results.items()
        for each in result.get("targets", [])
        if not each["met"]
    ]
    lines = [_HEAD, *table(overview)]
    if missed:
        lines += ["", "## Targets that are missed", "", *table(missed)]
    return "\n".join(lines) + "\n"


def _met(targets: Sequence[Mapping[str, Any]]) -> str | None:
    if not targets:
        return None
    return f"{sum(bool(each['met']) for each in targets)} of {len(targets)}"


def _goal(target: Mapping[str, Any]) -> str:
    goal = target["goal"]
    return goal if isinstance(goal, str) else f">= {goal}"


if __name__ == "__main__":
    main()
