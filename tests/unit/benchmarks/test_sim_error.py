from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result import Row
from benchmarks.sim_error import agreement, compared, main, measured_twice, targets
from benchmarks.sim_error_load import (
    LENGTHS,
    PLACED,
    PROBES,
    Arrival,
    Stack,
    arrivals,
    measured,
    metrics,
    prompt_of,
    send_and_probe,
    warming,
)
from benchmarks.sim_error_model import simulated, simulated_rate, slowed
from kvmesh.cli.stack_client import Timing
from kvmesh.sim.trace_request import TRACE_BLOCK
from tests.unit.cli.test_stack_costs import measured as profiled
from tests.unit.cli.test_stack_costs import profile_of, record_of

PAIR = Stack(1, 1, "kvmesh")
METRICS = ("ttft p50", "ttft p90", "ttft p99", "tpot p50", "tpot p90", "tpot p99", PLACED)


def test_a_lone_request_is_simulated_as_it_was_measured() -> None:
    profile = profile_of(profiled())
    found = simulated(profile, PAIR, [Arrival(0.0, 512)], ())
    assert found.ttft_s == pytest.approx([0.006 + 0.512], rel=0.01)
    assert found.aggregated == 0.0


def test_arrivals_come_at_the_rate_and_from_the_seed() -> None:
    found = arrivals(20.0, 30.0, 1)
    assert found == arrivals(20.0, 30.0, 1)
    assert 500 < len(found) < 700
    lengths = sorted(each.tokens for each in found)
    assert LENGTHS[0] <= lengths[0] < lengths[-1] <= LENGTHS[1]
    assert lengths[len(lengths) // 2] == pytest.approx(math.sqrt(64 * 640), rel=0.15)
    assert {each.prefix for each in found} == {0, 1, 2, 3, 4}
    assert all(a.at_s < b.at_s < 30 for a, b in itertools.pairwise(found))


def test_a_load_in_several_seeds_is_one_load() -> None:
    early = Timing(0.0, (0.1, 0.2, 0.3), "aggregated")
    late = Timing(0.0, (0.3, 0.5, 0.7), "disaggregated")
    found = measured([[early] * 3, [late] * 2])
    assert (found["requests"], found["ttft p50"], found[PLACED]) == (5, 100.0, 60.0)
    assert [each["tpot p50"] for each in found["by_seed"]] == [100.0, 200.0]


def test_users_of_a_closed_loop_get_what_the_scarcer_side_gives() -> None:
    """Two workers; prompts of 250 tokens in the mean and a prefix of 512, a millisecond each."""
    profile = profile_of(profiled())
    rate = simulated_rate(profile, PAIR, 8, 8.0, 1)
    assert 1 / 0.8 < rate < 2 / 0.25


def test_shared_prefixes_are_equal_and_the_rest_is_not() -> None:
    draw = random.Random(1)
    one, other = (prompt_of(Arrival(0.0, 64, 2), draw) for _ in range(2))
    assert one[:TRACE_BLOCK] == other[:TRACE_BLOCK]
    assert one[TRACE_BLOCK:] != other[TRACE_BLOCK:]
    assert len(one) == Arrival(0.0, 64, 2).input_tokens
    assert prompt_of(Arrival(0.0, 64, 3), draw)[:TRACE_BLOCK] != one[:TRACE_BLOCK]


def test_a_shared_prefix_is_computed_once_in_the_simulator_too() -> None:
    load = [Arrival(0.0, 64, 1), Arrival(5.0, 64, 1)]
    first, second = simulated(profile_of(profiled()), PAIR, load, ()).ttft_s
    assert second < first / 3


def test_what_varies_live_varies_in_the_simulator() -> None:
    lone = [Arrival(2.0 * number, 512) for number in range(200)]
    even = simulated(profile_of(profiled()), PAIR, lone, ()).ttft_s
    uneven = simulated(
        profile_of(dataclasses.replace(profiled(), spread=0.2)), PAIR, lone, ()
    ).ttft_s
    assert max(even) == pytest.approx(min(even))
    assert statistics.mean(uneven) == pytest.approx(statistics.mean(even), rel=0.05)
    assert statistics.stdev(uneven) == pytest.approx(0.2 * 0.512, rel=0.3)


def live_of(**shares: float) -> dict[str, Any]:
    """What was measured: one fleet, and policies whose times are so many times its own."""

    def load(share: float, times: float = 1.0) -> Row:
        found: Row = dict.fromkeys(METRICS, times * 100.0)
        by_seed = [dict(found), dict(found)]
        return {"share": share, "slower": [1.0, 1.0], "requests": 9, **found, "by_seed": by_seed}

    stack = {"prefill": 1, "decode": 1, "rate": 0.5}
    policies = [
        {**stack, "policy": name, "loads": [load(0.8, times)]} for name, times in shares.items()
    ]
    fleet = {**stack, "policy": "kvmesh", "loads": [load(0.2), load(0.5)]}
    return {
        "date": "2026-01-01T00:00:00", "commit": "c", "seconds": 10.0, "seed": 1, "seeds": 2,
        "engines": {
            "cpu": {"profile": record_of(profiled()), "fleets": [fleet], "policies": policies},
        },
    }  # fmt: skip


def said(policy: str, says: float) -> list[Row]:
    label = Stack(1, 1, policy).label
    return [{"stack": label, "metric": each, "simulated": says} for each in METRICS]


def test_only_policies_that_differ_live_have_an_order() -> None:
    live = live_of(a=1.0, b=1.02, c=2.0)["engines"]["cpu"]["policies"]
    rows = [*said("a", 5.0), *said("b", 4.0), *said("c", 4.5)]
    alike, apart = agreement(live, rows)
    assert (alike, apart) == (4, 8), "in each metric c is worse than b in both, than a only live"


def test_an_order_that_one_seed_turns_round_is_none() -> None:
    live = live_of(a=1.0, b=2.0)["engines"]["cpu"]["policies"]
    live[1]["loads"][0]["by_seed"][1]["ttft p50"] = 90.0
    alike, apart = agreement(live, [*said("a", 1.0), *said("b", 2.0)])
    assert (alike, apart) == (3, 3)


class Machine:
    """A client of a stack whose lone decode steps take so many seconds at each look."""

    def __init__(self, *steps_s: float) -> None:
        self._steps = [step for step in steps_s for _ in range(PROBES)]

    async def together(self, count: int, input_tokens: int, output_tokens: int) -> list[Timing]:
        assert count == 1
        step_s = self._steps.pop(0)
        return [Timing(0.0, tuple(0.1 + step_s * n for n in range(output_tokens)), "aggregated")]

    async def complete_prompt(self, prompt: list[int], output_tokens: int) -> Timing | None:
        return Timing(0.0, (1.0, 2.0), "aggregated")


async def test_lone_steps_around_a_load_tell_how_slow_the_machine_is() -> None:
    machine: Any = Machine(0.002, 0.003)
    found = await send_and_probe(machine, [Arrival(0.0, 64)], 1, 0.002)
    assert [each.ttft_s for each in found.timings] == [1.0]
    assert found.slower == pytest.approx(1.25)


async def test_steps_that_no_tenant_slows_are_not_looked_at() -> None:
    machine: Any = Machine()
    found = await send_and_probe(machine, [Arrival(0.0, 64)], 1, 0.0)
    assert (len(found.timings), found.slower) == (1, 1.0)


def test_all_times_of_a_profile_are_longer_on_a_slower_machine() -> None:
    record = record_of(profiled())
    load = [Arrival(0.0, 512), Arrival(0.1, 64, 1), Arrival(0.2, 300)]
    alone = simulated(slowed(record, 1.0), PAIR, load, ())
    late = [dataclasses.replace(each, at_s=3 * each.at_s) for each in load]
    slower = simulated(slowed(record, 3.0), PAIR, late, ())
    assert slower.ttft_s == pytest.approx([3 * each for each in alone.ttft_s], rel=0.02)
    assert slower.tpot_s == pytest.approx([3 * each for each in alone.tpot_s], rel=0.02)
    assert simulated(profile_of(profiled()), PAIR, load, ()) == alone


def test_what_was_measured_is_simulated_again_to_the_same_rows(tmp_path: Path) -> None:
    live = live_of(kvmesh=1.0, round_robin=2.0)
    kept, out = tmp_path / "kept.json", tmp_path / "out.json"
    kept.write_text(json.dumps({"live": live}))
    assert main(["--again", str(kept), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["live"] == json.loads(kept.read_text())["live"]
    assert result["rows"] == compared(live, "cpu", "fleets") + compared(live, "cpu", "policies")
    assert any("measured on 2026-01-01 at commit c" in note for note in result["notes"])


def test_the_rows_hold_both_and_the_error_of_every_load() -> None:
    live = live_of(kvmesh=1.0)
    rows = compared(live, "cpu", "fleets")
    assert {row["load"] for row in rows} == {"8 users", "0.2", "0.5"}
    fleet = live["engines"]["cpu"]["fleets"][0]
    load = arrivals(0.2 * fleet["rate"], live["seconds"], 3)
    more = arrivals(0.2 * fleet["rate"], live["seconds"], 13)
    models = [simulated(profile_of(profiled()), PAIR, each, warming(0.5)) for each in (load, more)]
    ttft_s = [each for model in models for each in model.ttft_s]
    tpot_s = [each for model in models for each in model.tpot_s]
    expected = metrics(ttft_s, tpot_s, 0.0)["ttft p50"]
    row = next(row for row in rows if (row["load"], row["metric"]) == ("0.2", "ttft p50"))
    assert (row["measured"], row["simulated"]) == (100.0, expected)
    assert row["error_percent"] == pytest.approx(expected - 100, abs=0.1)


def test_a_load_that_was_measured_in_both_parts_shows_the_noise() -> None:
    live = live_of(kvmesh=1.2)
    assert measured_twice(live, "cpu") == [], "the fleet had no such load"
    found = live["engines"]["cpu"]
    found["policies"][0] |= {"prefill": 2, "decode": 2}
    found["fleets"].append(
        {**found["policies"][0], "loads": live_of(a=1.0)["engines"]["cpu"]["policies"][0]["loads"]}
    )
    rows = measured_twice(live, "cpu")
    assert [row["metric"] for row in rows] == ["ttft p50", "ttft p90", "tpot p50", "tpot p90"]
    assert {(row["measured"], row["measured again"], row["error_percent"]) for row in rows} == {
        (100.0, 120.0, 20.0)
    }


def test_targets_are_of_the_largest_error_and_of_the_order() -> None:
    fleets = [
        {"stack": "a", "metric": metric, "error_percent": error}
        for metric in ("ttft p50", "ttft p90", "tpot p50", "tpot p90")
        for error in (5.0, -20.0)
    ]
    live = live_of(a=1.0, b=2.0)["engines"]["cpu"]["policies"]
    found = targets("cpu", live, fleets, [*said("a", 1.0), *said("b", 3.0)])
    by_name = {each.name: each for each in found}
    assert by_name["cpu, a: ttft p50, largest error, %"].value == pytest.approx(20.0)
    assert by_name["cpu: policies ordered alike, of 4 pairs, share"].met
