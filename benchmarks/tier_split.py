"""On what a worker spends the time to a first token behind a prefix from its tiers.

Tests: tests/unit/benchmarks/test_tiers.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Split:
    """Parts of the time of one request on its worker, in milliseconds.

    Attributes:
        loading_ms: until its prefix was in the pool, from the begin of the copies.
        computing_ms: from there to its first token.
    """

    loading_ms: float
    computing_ms: float


def splits(lines: str) -> dict[str, Split]:
    """The parts of every request whose prefix was loaded, by its id.

    Args:
        lines: spans of a worker, as `telemetry.trace.exporter=jsonl` writes them.
    """
    found: dict[str, Split] = {}
    for span in map(json.loads, lines.splitlines()):
        events: dict[str, Any] = {each["name"]: each for each in span["events"]}
        if span["name"] != "prefill.request" or "prefix_load" not in events:
            continue
        load, first = events["prefix_load"], events["first_token"]
        computing_ms = (first["time_ns"] - load["time_ns"]) / 1e6
        loading_ms = 1e3 * load["attributes"]["seconds"]
        found[span["attributes"]["request_id"]] = Split(loading_ms, computing_ms)
    return found
