"""What `benchmarks.gateway` is to reach: other systems' numbers, of the same run where they ran."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gateway_phases import CROWD_LIMIT_MS
from benchmarks.gateway_systems import LOADER_ALONE
from benchmarks.result import Row, Target

_ONE = "requests, 1 in flight"
_MANY = "requests, 32 in flight"
_TOKENS = "tokens, "
_FIRST = "first token, "

# Measured on two cores shared with loader and workers; used where a system did not run.
_KNOWN = {
    ("dynamo", _ONE, "per s"): 1270.0,
    ("dynamo", _MANY, "per s"): 3980.0,
    ("dynamo", _TOKENS, "per s"): 30_000.0,
    ("dynamo", _TOKENS, "front cpu s/1000"): 4.0,
    ("sglang-router", _MANY, "per s"): 16_850.0,
    ("sglang-router", _TOKENS, "per s"): 69_000.0,
    ("sglang-router", _TOKENS, "front cpu s/1000"): 1.5,
}


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """The targets and what was measured for them."""

    def value(system: str, what: str, name: str) -> float | None:
        for row in rows:
            if row["system"] == system and row["what"].startswith(what):
                found = row.get(name)
                return None if found is None else float(found)
        return None

    def ratio(rival: str, what: str, name: str) -> tuple[str, float | None]:
        """Ours as a multiple of a rival's."""
        measured = value(rival, what, name)
        other = _KNOWN[rival, what, name] if measured is None else measured
        ours = value("kvmesh", what, name)
        origin = "" if measured is not None else f" (at {other:g}, not in this run)"
        label = f"{what.strip(', ')} {name}, x {rival}{origin}"
        return label, None if ours is None or not other else ours / other

    def added(name: str) -> float | None:
        """What the gateway adds to what the loader sees before a bare worker."""
        ours, alone = value("kvmesh", _FIRST, name), value(LOADER_ALONE, _FIRST, name)
        return None if ours is None or alone is None else round(ours - alone, 3)

    targets = [
        Target(*ratio("dynamo", _ONE, "per s"), 1.0),
        Target(*ratio("dynamo", _MANY, "per s"), 1.0),
        Target(*ratio("dynamo", _TOKENS, "per s"), 1.0),
        Target(*ratio("dynamo", _TOKENS, "front cpu s/1000"), 1.0, at_most=True),
        Target(*ratio("sglang-router", _MANY, "per s"), 0.25),
        Target(*ratio("sglang-router", _TOKENS, "per s"), 0.25),
        Target(*ratio("sglang-router", _TOKENS, "front cpu s/1000"), 4.0, at_most=True),
        Target("added first token p50 ms", added("p50 ms"), 1.5, at_most=True),
        Target("added first token p99 ms", added("p99 ms"), 10.0, at_most=True),
        Target("streams broken by a killed worker", value("kvmesh", "1 of", "failed"), 0.0, True),
    ]
    for factor in (4, 7):
        what = f"overload {factor}x"
        for name, label in (("late", "served late"), ("failed", "neither served nor refused")):
            targets.append(Target(f"{what}, {label}", value("kvmesh", what, name), 0.0, True))
        refused = value("kvmesh", what, "refused p99 ms")
        targets.append(Target(f"{what}, refused p99 ms", refused, 1000.0, True))
    for name, label, goal in (
        ("p99 ms", "first token p99 ms, as clients see it", CROWD_LIMIT_MS + 1000),
        ("refused p99 ms", "refused p99 ms, as clients see it", CROWD_LIMIT_MS),
        ("failed", "neither served nor refused", 0),
    ):
        found = value("kvmesh", "crowd 7x", name)
        targets.append(Target(f"crowd 7x, {label}", found, float(goal), True))
    return targets
