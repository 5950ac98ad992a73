"""Restarts live: two of everything, ended in order and started again one after the other, while
streams run through both gateways.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleet_engines import FleetEngine
from benchmarks.fleet_load import say
from benchmarks.result import Row, Target
from tests.chaos.rolling import any_order, restarts, rolling_mesh

SEED = 7
"""Of the order."""

MOST_PAUSE_MS = 2000
"""Also when Redis fails over."""


async def rolling(folder: Path, _scale: float, engine: FleetEngine) -> list[Row]:
    """Everything is restarted once."""
    async with rolling_mesh(folder, engine=engine.kind, shows_logs=False) as mesh:
        found, wrong = await restarts(mesh, any_order(SEED), SEED, engine.tokens)
    rows: list[Row] = [
        {
            "part": "restart",
            "case": each.name,
            "answers": each.streams,
            "done s": round(each.seconds, 1),
            "longest pause ms": round(1e3 * each.pause_s),
        }
        for each in found
    ]
    for row in rows:
        say(f"  {row}")
    all_of_them = {"case": "all", "answers": sum(row["answers"] for row in rows)}
    return [*rows, {"part": "restart", **all_of_them, "failed or wrong": len(wrong)}]


def judge_rolling(rows: Sequence[Row]) -> list[Target]:
    """What was to hold."""
    *restarted, whole = rows
    what = f"restart: of {whole['answers']} streams, failed or with other tokens"
    longest = max(row["longest pause ms"] for row in restarted)
    return [
        Target(what, whole["failed or wrong"], 0, at_most=True),
        Target("restart: longest pause of a stream in ms", longest, MOST_PAUSE_MS, at_most=True),
    ]
