"""Systems that differ by a few percent, compared in rounds: each round has a load of its own that
all of them get, in an order that turns round, so that neither chance nor the hour favours one.

Tests: tests/unit/benchmarks/test_live_rounds.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.result import Row, spread

ROUNDS = 3
_SPREAD = ("refused", "TTFT p50", "TTFT p90", "TPOT p50", "good", "goodput/s")


def order(systems: Sequence[str], number: int) -> list[str]:
    """In which order the systems of a round get its load.

    Args:
        number: of the round.
    """
    return list(systems if number % 2 == 0 else reversed(systems))


def round_seed(seed: int, number: int) -> int:
    """Of the load of a round; far from those of other seeds."""
    return seed + 100 * number


def summaries(rows: Sequence[Row]) -> list[Row]:
    """A row for each system with the spread over its rounds."""
    found: list[Row] = []
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        numbers = {name: spread([row[name] for row in own]) for name in _SPREAD}
        found.append({"part": own[0]["part"], "system": system, "round": "all", **numbers})
    return found


def gain(rows: Sequence[Row], system: str, over: str) -> float:
    """Median over the rounds of the goodput of one system over another's, under the same load."""
    good = {
        (row["round"], row["system"]): float(row["goodput/s"])
        for row in rows
        if row["round"] != "all"
    }
    ratios = [
        value / max(good[number, over], 1e-3)
        for (number, name), value in good.items()
        if name == system
    ]
    return statistics.median(ratios)
