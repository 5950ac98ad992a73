from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics

import pytest

from benchmarks.sim_error import agreement, targets
from benchmarks.sim_error_load import (
    LENGTHS,
    Arrival,
    Modelled,
    Stack,
    arrivals,
    compare,
    prompt_of,
    rate_row,
    simulated,
    simulated_rate,
)
from kvmesh.cli.stack_client import Timing
from kvmesh.cli.stack_costs import (
    LENGTHS as PROFILED,
)
from kvmesh.cli.stack_costs import (
    SHARED_BATCH,
    SHARED_LENGTH,
    SHARED_OUTPUT,
    TINY,
    Beside,
    Measured,
    StepSample,
    beside_of,
    fit_decode,
    spread_of,
    stack_record,
    steps_of,
)
from kvmesh.sim.fields import Fields
from kvmesh.sim.profile import Front, Loop, Profile
from kvmesh.sim.profile_file import parse_profile
from kvmesh.sim.trace_request import TRACE_BLOCK

STEP_S, PER_SEQUENCE_S, PER_TOKEN_S = 0.004, 0.0005, 1e-6


def sample(batch: int, context_each: float) -> StepSample:
    context = batch * context_each
    step = STEP_S + PER_SEQUENCE_S * batch + PER_TOKEN_S * context
    return StepSample(batch, context, step)


SHORT = tuple(sample(batch, 50) for batch in (1, 4, 8))
LONG = sample(4, 800)
BESIDE = Beside(
    0.006 + 1.5 * 0.001 * SHARED_LENGTH,
    1.25 * sample(SHARED_BATCH, TINY + SHARED_OUTPUT / 2).step_s,
)
FRONT = Front(4.0, 0.001, 1e-5, 1e-3)
LOOP = Loop(0.002, 0.001, 3e-4)


def measured() -> Measured:
    """A millisecond per prompt token, 6 ms of overhead, 20 ms from first to second token."""
    first = {n: 0.006 + 0.001 * n for n in PROFILED}
    first[TINY] = 0.006 + SHORT[0].step_s
    return Measured(first, dict.fromkeys(first, 0.02), SHORT, LONG, BESIDE, FRONT, LOOP)


PAIR = Stack(1, 1, "kvmesh")


def profile_of(seen: Measured) -> Profile:
    """What the simulator reads of the file."""
    record = stack_record(seen, "m", [(1, 1000), (2048, 2_048_000)], 16_384)
    return parse_profile(Fields(json.loads(json.dumps(record)), "file"))


def stream(first_s: float, step_s: float, count: int) -> Timing:
    return Timing(0.0, tuple(first_s + step_s * n for n in range(count)), "disaggregated")


def test_step_is_measured_while_all_generate() -> None:
    """The second starts late, and after the first has ended it would be alone and faster."""
    late = Timing(0.0, (*stream(0.5, 0.01, 60).token_s, *stream(1.1, 0.001, 60).token_s), "")
    found = steps_of([stream(0.1, 0.01, 100), late], 10)
    assert found is not None
    assert found.step_s == pytest.approx(0.01, rel=0.03)
    assert (found.batch, found.context) == (2, 2 * (10 + 50))


def test_no_step_without_time_together() -> None:
    assert steps_of([stream(0.1, 0.01, 50), stream(0.5, 0.01, 50)], 10) is None
    assert steps_of([stream(0.1, 0.01, 50), stream(5.0, 0.01, 50)], 10) is None


def test_costs_of_a_step_are_found_again() -> None:
    cost = fit_decode(SHORT, LONG)
    assert cost.constant == pytest.approx(STEP_S)
    assert cost.per_sequence == pytest.approx(PER_SEQUENCE_S, rel=0.01)
    assert cost.per_token == pytest.approx(PER_TOKEN_S, rel=0.01)


def test_a_lone_request_is_simulated_as_it_was_measured() -> None:
    profile = profile_of(measured())
    found = simulated(profile, PAIR, [Arrival(0.0, 512)], ())
    assert found.ttft_s == pytest.approx([0.006 + 0.512], rel=0.01)
    assert found.aggregated == 0.0


def test_what_sharing_costs_is_found_again() -> None:
    sharing = profile_of(measured()).sharing
    assert sharing is not None
    assert sharing.prefill == pytest.approx(1.5, rel=0.01)
    assert sharing.decode == pytest.approx(1.25, rel=0.01)


def test_what_the_front_took_is_counted_once() -> None:
    """On two cores with a fifth of one for the front, the prompt had what the steps left."""
    seen = dataclasses.replace(
        measured(),
        beside=dataclasses.replace(BESIDE, front_cores=0.2),
        front=dataclasses.replace(FRONT, cores=2.0),
    )
    sharing = profile_of(seen).sharing
    assert sharing is not None
    assert sharing.prefill == pytest.approx(1.5 * 0.8, rel=0.01)
    assert sharing.decode == pytest.approx(1.25, rel=0.01)
    assert (sharing.front, sharing.loop) == (seen.front, LOOP)


def test_prompts_count_while_all_generate() -> None:
    decoding = [stream(1.0, 0.02, 100), stream(1.2, 0.02, 100)]
    prompts = [Timing(at, (at + 0.3, at + 0.35), "") for at in (0.5, 1.3, 1.7, 2.1, 2.9)]
    found = beside_of(decoding, prompts)
    assert found is not None
    assert found.first_s == pytest.approx(0.3)
    assert found.step_s == pytest.approx(0.02, rel=0.05)
    assert beside_of(decoding, prompts[:3]) is None


def test_prefill_never_falls() -> None:
    scattered = measured()
    scattered.first_s[256] = 0.0
    profile = profile_of(scattered)
    curve = profile.devices["cpu"].prefill_s
    assert curve(256) == curve(128)


def test_arrivals_come_at_the_rate_and_from_the_seed() -> None:
    found = arrivals(20.0, 30.0, 1)
    assert found == arrivals(20.0, 30.0, 1)
    assert 500 < len(found) < 700
    assert {each.tokens for each in found} == set(LENGTHS)
    assert {each.prefix for each in found} == {0, 1, 2, 3, 4}
    assert all(a.at_s < b.at_s < 30 for a, b in itertools.pairwise(found))


def test_error_is_of_what_was_measured() -> None:
    seen = [Timing(0.0, (0.1, 0.2, 0.3), "aggregated")] * 3
    rows = compare(PAIR, "0.5", seen, Modelled([0.11] * 3, [0.08] * 3, 0.25))
    by_metric = {row["metric"]: row for row in rows}
    assert by_metric["ttft p50"]["error_percent"] == pytest.approx(10)
    assert by_metric["tpot p99"]["error_percent"] == pytest.approx(-20)
    placed = by_metric["prompts computed where decoded, %"]
    assert (placed["measured"], placed["simulated"]) == (100.0, 25.0)


def test_users_of_a_closed_loop_get_what_the_scarcer_side_gives() -> None:
    """Prompts of 288 tokens in the mean and a prefix of 512, a millisecond each, one at a time."""
    profile = profile_of(measured())
    rate = simulated_rate(profile, PAIR, 8.0, 1)
    assert 1 / 0.8 < rate < 1 / 0.288
    assert rate_row(PAIR, 2 * rate, rate)["error_percent"] == -50.0


def test_shared_prefixes_are_equal_and_the_rest_is_not() -> None:
    draw = random.Random(1)
    one, other = (prompt_of(Arrival(0.0, 64, 2), draw) for _ in range(2))
    assert one[:TRACE_BLOCK] == other[:TRACE_BLOCK]
    assert one[TRACE_BLOCK:] != other[TRACE_BLOCK:]
    assert len(one) == Arrival(0.0, 64, 2).input_tokens
    assert prompt_of(Arrival(0.0, 64, 3), draw)[:TRACE_BLOCK] != one[:TRACE_BLOCK]


def test_a_shared_prefix_is_computed_once_in_the_simulator_too() -> None:
    load = [Arrival(0.0, 64, 1), Arrival(5.0, 64, 1)]
    first, second = simulated(profile_of(measured()), PAIR, load, ()).ttft_s
    assert second < first / 3


def row(policy: str, metric: str, live: float, says: float) -> dict[str, object]:
    stack = Stack(2, 2, policy).label
    error = 100 * (says / live - 1)
    return {"stack": stack, "metric": metric, "measured": live, "simulated": says,
            "error_percent": error}  # fmt: skip


def test_only_policies_that_differ_live_have_an_order() -> None:
    rows = [
        row("a", "ttft p50", 1.0, 5.0),
        row("b", "ttft p50", 1.02, 4.0),
        row("c", "ttft p50", 2.0, 4.5),
    ]
    assert agreement(rows) == (1, 2), "c is worse than b in both, than a only live"


def test_targets_are_of_the_largest_error_and_of_the_order() -> None:
    rows = [
        row("a", metric, 1.0, error)
        for metric in ("ttft p50", "ttft p90", "tpot p50", "tpot p90")
        for error in (1.05, 0.8)
    ]
    ranked = [row("a", "ttft p50", 1.0, 1.0), row("b", "ttft p50", 2.0, 3.0)]
    by_name = {each.name: each for each in targets(rows, ranked)}
    assert by_name["2+2 a: ttft p50, largest error, %"].value == pytest.approx(20.0)
    assert by_name["policies ordered alike, of 1 pairs, share"].met


def test_spread_is_relative_and_one_late_run_is_not_all_of_it() -> None:
    draw = random.Random(1)
    assert spread_of([draw.gauss(2.0, 0.2) for _ in range(2000)]) == pytest.approx(0.1, rel=0.1)
    assert spread_of([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0


def test_what_varies_live_varies_in_the_simulator() -> None:
    lone = [Arrival(2.0 * number, 512) for number in range(200)]
    even = simulated(profile_of(measured()), PAIR, lone, ()).ttft_s
    uneven = simulated(
        profile_of(dataclasses.replace(measured(), spread=0.2)), PAIR, lone, ()
    ).ttft_s
    assert max(even) == pytest.approx(min(even))
    assert statistics.mean(uneven) == pytest.approx(statistics.mean(even), rel=0.05)
    assert statistics.stdev(uneven) == pytest.approx(0.2 * 0.512, rel=0.3)
