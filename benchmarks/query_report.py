"""The goals of the query benchmark, from its rows, and where asking wins. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.result import Row, Target

LAYER, PROMPT = "layer", "prompt"


def _row(rows: Sequence[Row], what: str, channel: str, new: int, prefix: int) -> Row | None:
    keys = {"what": what, "channel": channel, "new": new, "prefix": prefix}
    return next((row for row in rows if all(row[key] == keys[key] for key in keys)), None)


def _ratio(row: Row | None, column: str, other: str) -> float | None:
    if row is None or not row.get(column) or not row.get(other):
        return None
    return float(row[column]["median"] / row[other]["median"])


def targets(rows: Sequence[Row], longest: int) -> list[Target]:
    """Round trips and whole prompts against what is done otherwise."""
    found = []
    for channel in ("shm", "tcp"):
        smallest = min((row["prefix"] for row in rows if row["what"] == LAYER), default=0)
        layer = _row(rows, LAYER, channel, 1, smallest)
        trip = None if layer is None else layer["ask_ms"]["median"] - layer["attend_ms"]["median"]
        found.append(Target(f"{channel}: round trip beside the attention, ms", trip, 1.0, True))
        prompt = _row(rows, PROMPT, channel, 16, longest)
        name = f"{channel}: 16 new tokens behind {longest}: asked, of computed"
        found.append(Target(name, _ratio(prompt, "asked_ms", "computed_ms"), 0.25, at_most=True))
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """Where each way is the fastest."""
    lines = []
    for row in rows:
        if row["what"] != PROMPT:
            continue
        ways = {way: row[f"{way}_ms"]["median"] for way in ("asked", "fetched", "computed")}
        best = min(ways, key=lambda way: ways[way])
        lines.append(f"{row['channel']}, {row['new']} new behind {row['prefix']}: {best}")
    return lines
