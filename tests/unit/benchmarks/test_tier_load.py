"""What needs no processes of the benchmark of tiers under load: forms, rows, verdicts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.result import Row
from benchmarks.tier_load import ALONE, FAR, FORMS, LOADS, TIERED, Asked, row_of, targets


def test_every_form_has_the_same_pools_and_its_own_tiers() -> None:
    flags = {form.name: form.flags(Path("model"), Path("folder")) for form in FORMS}
    pools = {each["prefill"]["engine.num-blocks"] for each in flags.values()}
    assert len(pools) == 1
    assert "tiers.host-gib" not in flags[ALONE]["prefill"]
    assert "tiers.host-gib" in flags[TIERED]["prefill"]
    assert flags[ALONE]["prefill"] == flags[f"{ALONE}, cache_aware"]["prefill"]
    assert {name for name, each in flags.items() if FAR in each} == {"+ disk, second cluster"}


def test_a_row_counts_what_came_in_time_and_what_was_cached() -> None:
    asked = [Asked(100, 50, 0.5, True), Asked(100, 0, 9.0, True), Asked(100, 90, 0.0, False)]
    row = row_of("form", "load", asked, 2.0, unit_s=0.25)
    assert (row["requests"], row["failed"], row["good"], row["goodput/s"]) == (3, 1, 0.333, 0.5)
    assert row["hit rate"] == round(140 / 300, 4)
    assert (row["TTFT p50"], row["TTFT p99"]) == (4750, 8915)


def test_the_verdicts_compare_forms_under_one_load() -> None:
    rows: list[Row] = [
        {"load": load, "form": form.name, "goodput/s": 1.0 + 1.5 * bool(form.host)}
        for load in LOADS
        for form in FORMS
    ]
    found = {target.name: target for target in targets(rows)}
    over = found["sessions: goodput with host memory over pools alone"]
    assert (over.value, over.met) == (2.5, True)
    assert found["fits: goodput over pools alone, + disk"].value == 2.5
    assert all(target.value is not None for target in found.values())
    assert all(target.value is None for target in targets(rows[:1]))
