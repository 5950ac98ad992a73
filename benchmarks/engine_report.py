"""Targets of the engine benchmark, and its result as a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines import ENGINES
from kvmesh.cli.bench_report import target_table

WEIGHTS_READ = "weights read"
"""Nothing but reading as many bytes as there are weights."""
SHARE_OF_READING = "share_of_weights_read"
"""Field of a row: the time of reading the weights over that of our step, median of all turns."""
_ENGINES = ("kvmesh", "transformers", "hand loop", *ENGINES, WEIGHTS_READ, "floor")


def _target(name: str, value: float, goal: float, *, at_most: bool = False) -> dict[str, Any]:
    met = value <= goal if at_most else value >= goal
    return {"name": name, "value": round(value, 3), "goal": goal, "met": met}


def targets(
    rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Any], *, only_avx2: bool = False
) -> list[dict[str, Any]]:
    """What was to be reached; those whose cells were not measured are left out.

    A ratio over several cells is the lowest of them.

    Args:
        only_avx2: all engines computed without AVX-512 and bf16.
    """
    out = []

    def lowest(peer: str, goal: float, cell: str = "", model: str = "") -> None:
        ratios = [
            row["tokens_per_s"]["kvmesh"] / row["tokens_per_s"][peer]
            for row in rows
            if peer in row["tokens_per_s"]
            and row["cell"].startswith(cell)
            and row["model"].startswith(model)
        ]
        if ratios:
            where = " ".join(part for part in (model, cell or "every cell") if part)
            out.append(_target(f"{where}: times {peer}", min(ratios), goal))

    lowest("transformers", 1.15)
    lowest("hand loop", 0.95, cell="prefill")
    lowest("openvino", 1.0 if only_avx2 else 0.9, cell="prefill")
    if only_avx2:
        lowest("openvino", 1.0, cell="decode")
    else:
        lowest("openvino", 0.6, cell="decode", model="110M")
    for row in rows:
        label = f"{row['model']} {row['dtype']}"
        if (label, row["cell"]) == ("0.5B bfloat16", "decode 1"):
            name = f"{label} decode 1: share of weight streaming"
            out.append(_target(name, row[SHARE_OF_READING], 0.8))
    for label, found in limits.items():
        if label.startswith("110M"):
            name = f"{label} batch 8: step loop, batching and sampling, share of a step"
            out.append(_target(name, found["step_overhead_share"], 0.1, at_most=True))
    return out


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a Markdown page."""
    where = result["machine"]
    plain = "kvmesh without graphs"
    measured = {name for row in result["rows"] for name in row["tokens_per_s"]}
    engines = tuple(name for name in (*_ENGINES, plain) if name in measured)
    lines = [
        "# Engine benchmark",
        "",
        (
            f"{result['date']}, commit {result['commit'] or 'unknown'}, {where['processor']}, "
            f"{where['threads']} of {where['cores']} cores. Tokens per second, medians; decode "
            f"with context {result['context']}."
        ),
        "",
        "| model | dtype | cell | " + " | ".join(engines) + " |",
        "|---|---|---|" + "---|" * len(engines),
    ]
    for row in result["rows"]:
        cells = row["tokens_per_s"]
        numbers = (f"{cells[name]:.0f}" if name in cells else "" for name in engines)
        lines.append(f"| {row['model']} | {row['dtype']} | {row['cell']} | {' | '.join(numbers)} |")
    return "\n".join([*lines, "", *target_table(result["targets"])]) + "\n"
