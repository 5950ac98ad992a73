"""What `benchmarks.gateway` is to reach: other systems' numbers, of the same run where they ran."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gateway_phases import CROWD_LIMIT_MS, TOLD
from benchmarks.gateway_systems import LOADER_ALONE, OURS, ROLES, UNTOLD
from benchmarks.result import Row, Target

_ONE = "requests, 1 in flight"
_MANY = "requests, 32 in flight"
_FLOOD = "tokens, "
_FIRST = "first token, "

_OVER_DYNAMO, _OVER_DYNAMO_ROLES = 1.5, 1.3
_OF_DYNAMO_CPU = 0.8
_OF_ROUTER_FLOOD = 0.6
_ADDED_MS = {"p50 ms": 2.5, "p99 ms": 10.0}
_UNTOLD_PER_S = 0.95
_TOLD = ("1 in flight", "32 in flight", "64 streams")


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """The targets and what was measured for them; None where a system did not run."""

    def value(system: str, what: str, name: str) -> float | None:
        for row in rows:
            if row["system"] == system and row["what"].startswith(what):
                found = row.get(name)
                return None if found is None else float(found)
        return None

    def ratio(own: str, other: str, what: str, name: str = "per s") -> tuple[str, float | None]:
        """One system's number as a multiple of another's."""
        mine, theirs = value(own, what, name), value(other, what, name)
        label = f"{own}: {what.strip(', ')} {name}, x {other}"
        return label, None if mine is None or not theirs else mine / theirs

    def added(name: str) -> float | None:
        """What the gateway adds to what the loader sees before a bare worker."""
        mine, alone = value(OURS, _FIRST, name), value(LOADER_ALONE, _FIRST, name)
        return None if mine is None or alone is None else round(mine - alone, 3)

    targets = [
        Target(*ratio(OURS, "dynamo", _ONE), _OVER_DYNAMO),
        Target(*ratio(OURS, "dynamo", _MANY), _OVER_DYNAMO),
        Target(*ratio(ROLES, "dynamo", _ONE), _OVER_DYNAMO_ROLES),
        Target(*ratio(ROLES, "dynamo", _MANY), _OVER_DYNAMO_ROLES),
        Target(*ratio(OURS, "dynamo", _FIRST, "all cpu s/1000"), _OF_DYNAMO_CPU, at_most=True),
        Target(*ratio(OURS, "sglang-router", _FLOOD), _OF_ROUTER_FLOOD),
        *(
            Target(f"added first token {name}", added(name), goal, at_most=True)
            for name, goal in _ADDED_MS.items()
        ),
        *(Target(*ratio(OURS, UNTOLD, f"{TOLD}, {how}"), _UNTOLD_PER_S) for how in _TOLD),
        Target("streams broken by a killed worker", value(OURS, "1 of", "failed"), 0.0, True),
    ]
    for factor in (4, 7):
        what = f"overload {factor}x"
        for name, label in (("late", "served late"), ("failed", "neither served nor refused")):
            targets.append(Target(f"{what}, {label}", value(OURS, what, name), 0.0, True))
        refused = value(OURS, what, "refused p99 ms")
        targets.append(Target(f"{what}, refused p99 ms", refused, 1000.0, True))
    for name, label, goal in (
        ("p99 ms", "first token p99 ms, as clients see it", CROWD_LIMIT_MS + 1000),
        ("refused p99 ms", "refused p99 ms, as clients see it", CROWD_LIMIT_MS),
        ("failed", "neither served nor refused", 0),
    ):
        found = value(OURS, "crowd 7x", name)
        targets.append(Target(f"crowd 7x, {label}", found, float(goal), True))
    return targets
