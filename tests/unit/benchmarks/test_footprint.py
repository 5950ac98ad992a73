from __future__ import annotations

from benchmarks.footprint import Sample, rows_of, targets_of


def round_of(start_s: float, pss: float, idle: float) -> dict[str, Sample]:
    each = {"start s": start_s, "rss mib": 2 * pss, "pss mib": pss, "idle %": idle}
    services: dict[str, Sample] = {name: dict(each) for name in ("kvmanager", "scheduler")}
    services["gateway"] = {**each, "start s": 2 * start_s}
    return {**services, "redis": {"rss mib": 7.0, "pss mib": 5.0}}


def test_services_are_added_up_in_each_round_and_redis_stands_beside_them() -> None:
    rows = rows_of([round_of(0.5, 40.0, 0.2), round_of(0.7, 60.0, 0.4), round_of(0.6, 50.0, 0.3)])
    by_name = {row["process"]: row for row in rows}
    assert by_name["services together"]["pss mib"] == {"min": 120, "median": 150, "max": 180}
    assert by_name["services together"]["idle %"]["median"] == 0.9
    assert by_name["redis"]["pss mib"]["median"] == 5.0
    assert "start s" not in by_name["redis"]


def test_each_goal_is_met_or_missed_by_its_own_number() -> None:
    targets = targets_of(rows_of([round_of(0.8, 59.0, 0.6)]))
    met = {each.name: each.met for each in targets}
    assert met["memory together, pss mib"]
    assert met["start of the kvmanager, s"]
    assert not met["start of the gateway, s"]
    assert not met["scheduler at rest, % of a core"]
