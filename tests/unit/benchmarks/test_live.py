"""What needs no processes of the live benchmark: loads, profiles, rows, the twin, verdicts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import live_flowkv, live_pdserve, live_prfaas, live_tokenlake
from benchmarks.live_load import (
    DeviceShape,
    Limits,
    Phase,
    Seen,
    arrivals,
    live_row,
    profile_of,
    simulated,
    tokens_of,
    traced,
    write_profile,
)
from kvmesh.engine.step_times import load_step_times
from kvmesh.sim.profile_file import load_profile

LIMITS = Limits(1.0, 0.1)
PHASES = [Phase(5.0, 4.0, 300, 0.5, 2000, 8), Phase(5.0, 8.0, 50, 0.5, 2000, 8)]


def test_equal_arguments_make_equal_loads_in_order() -> None:
    load = arrivals(PHASES, 1)
    assert load == arrivals(PHASES, 1)
    assert load != arrivals(PHASES, 2)
    assert [each.at_s for each in load] == sorted(each.at_s for each in load)
    early = [each.input_tokens for each in load if each.at_s < 5.0]
    late = [each.input_tokens for each in load if each.at_s >= 5.0]
    assert min(early) > 32
    assert max(early) <= 2000
    assert sum(early) / len(early) > 2 * sum(late) / len(late)


def test_popular_prompts_begin_alike_and_go_on_differently() -> None:
    load = live_tokenlake.popular(arrivals(PHASES, 1), 0, 1)
    first = [each for each in load if each.prefix == 0][:2]
    draw = random.Random(1)
    one, two = (tokens_of(each, draw) for each in first)
    assert len(one) == first[0].input_tokens
    shared = live_tokenlake.PREFIX_TOKENS
    assert one[:shared] == two[:shared]
    assert one[shared:][:32] != two[shared:][:32]
    ids = [each.hash_ids for each in traced(first)]
    assert ids[0][: shared // 512] == ids[1][: shared // 512]
    assert not set(ids[0][shared // 512 :]) & set(ids[1])


def test_engines_and_the_simulator_read_one_profile(tmp_path: Path) -> None:
    shape = DeviceShape((0.01, 1e-3, 1e-6), (0.02, 1e-3))
    profile = profile_of({"device": shape}, 1024, 1e6)
    path = write_profile(tmp_path / "profile.json", profile)
    device = load_profile(str(path)).devices["device"]
    times = load_step_times(path, "device")
    assert times.of([(0, 700)]) == device.prefill_s(700)
    assert times.of([(9, 10), (19, 20)]) == device.decode.step_s(2, 30)
    row = simulated(
        "kvmesh", arrivals(PHASES, 1), path, "home:device:prefill:2,home:device:decode:2", LIMITS
    )
    assert row["sim goodput/s"] > 0
    assert row["sim TTFT p50"] > 0


def seen(at_s: float, outcome: str, ttft_s: float = 0.5, tpot_s: float = 0.05) -> Seen:
    (arrival, *_) = arrivals(PHASES, 1)
    return Seen(arrival, outcome, at_s, ttft_s, tpot_s)


def test_a_row_counts_what_was_good_refused_and_lost() -> None:
    load = arrivals(PHASES, 1)[:5]
    outcomes = [("served", 0.5), ("served", 2.0), ("refused", 0.0), ("error", 0.0), ("served", 0.7)]
    found = [
        Seen(arrival, outcome, arrival.at_s, ttft_s, 0.05)
        for arrival, (outcome, ttft_s) in zip(load, outcomes, strict=True)
    ]
    row = live_row("it", found, LIMITS)
    assert (row["requests"], row["refused"], row["errors"], row["good"]) == (5, 1, 1, 0.4)
    assert (row["TTFT p50"], row["TPOT p50"]) == (700, 50.0)
    assert row["goodput/s"] == round(2 / (load[-1].at_s - load[0].at_s), 2)


def test_recovery_ends_with_the_last_request_that_was_late_or_refused() -> None:
    good = [seen(at, "served") for at in (1.0, 6.5, 9.0)]
    assert live_pdserve.recovered_s(good, 5.0) == 0.0
    bad = [seen(2.0, "refused"), seen(6.0, "refused"), seen(7.0, "served", ttft_s=9.0)]
    assert live_pdserve.recovered_s(good + bad, 5.0) == 2.0


def test_a_lift_is_of_the_settled_threshold_and_not_of_a_burst() -> None:
    settled = live_prfaas.SETTLE_S
    seen = [
        live_prfaas.Seen(1000.0, is_low=False, for_s=settled),
        live_prfaas.Seen(4000.0, is_low=False, for_s=settled),
        live_prfaas.Seen(9000.0, is_low=True, for_s=settled - 0.1),  # just fell
        live_prfaas.Seen(2000.0, is_low=True, for_s=settled),
        live_prfaas.Seen(8000.0, is_low=True, for_s=settled),
        live_prfaas.Seen(9000.0, is_low=False, for_s=settled - 0.1),  # just came back
    ]
    assert live_prfaas.lift(seen) == pytest.approx(2.0)
    assert live_prfaas.lift(seen[:2]) == 1.0


def test_verdicts_compare_with_the_baselines() -> None:
    offload = [
        {"system": name, "goodput/s": value, "round": 1}
        for name, value in (
            ("all_local", 2.0),
            ("all_remote", 1.0),
            ("cache_load", 4.0),
            ("prfaas", 5.0),
            (live_prfaas.FLAPPING, 9.0),
        )
    ]
    offload[-1]["lift"] = 1.5
    assert [each.value for each in live_prfaas.judge(offload)] == [2.5, 1.25, 1.5]
    assert live_prfaas.judge(offload[:-1])[-1].met is None
    assert live_prfaas.judge([]) == []
    phases = [
        {"system": name, "goodput/s": value, "round": 1}
        for name, value in (("cache_load", 2.0), ("flowkv", 3.0), ("kvmesh", 1.0))
    ]
    assert [each.met for each in live_flowkv.judge(phases)] == [True, False]
    pool = [
        {"system": "cache_load", "hits": 0.4, "fetched": 0.0, "TTFT p90": 900},
        {"system": "cache_aware", "hits": 0.5, "fetched": 0.0, "TTFT p90": 600},
        {"system": "kvmesh", "hits": 0.3, "fetched": 0.3, "TTFT p90": 300},
    ]
    assert [each.value for each in live_tokenlake.judge(pool)] == [1.2, 0.5]
