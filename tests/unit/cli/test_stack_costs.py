from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from typing import Any

import pytest

from kvmesh.cli.front_cost import LEAST_CORES, LONG_LENGTH, StackCosts
from kvmesh.cli.stack_client import Timing
from kvmesh.cli.stack_costs import (
    LENGTHS as PROFILED,
)
from kvmesh.cli.stack_costs import (
    LONG_CONTEXT,
    SHARED_BATCH,
    SHARED_LENGTH,
    SHARED_OUTPUT,
    TINY,
    Beside,
    Measured,
    Rounds,
    StepSample,
    beside_of,
    fit_decode,
    median_step,
    spread_of,
    stack_record,
    steps_of,
)
from kvmesh.sim.fields import Fields
from kvmesh.sim.profile import Front, Loop, Profile
from kvmesh.sim.profile_file import parse_profile

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
COSTS = StackCosts(FRONT, LOOP, step_cores=1.0, prompt_cpu_s=0.001 * LONG_LENGTH)


def measured() -> Measured:
    """A millisecond per prompt token, 6 ms of overhead, 20 ms from first to second token."""
    first = {n: 0.006 + 0.001 * n for n in PROFILED}
    first[TINY] = 0.006 + SHORT[0].step_s
    return Measured(first, dict.fromkeys(first, 0.02), SHORT, LONG, BESIDE, COSTS)


def record_of(seen: Measured) -> dict[str, Any]:
    """The file."""
    return stack_record(seen, "m", [(1, 1000), (2048, 2_048_000)], 16_384)


def profile_of(seen: Measured) -> Profile:
    """What the simulator reads of the file."""
    return parse_profile(Fields(json.loads(json.dumps(record_of(seen))), "file"))


def stream(first_s: float, step_s: float, count: int) -> Timing:
    return Timing(0.0, tuple(first_s + step_s * n for n in range(count)), "disaggregated")


def test_step_is_measured_while_all_generate() -> None:
    """The second starts late, and after the first has ended it would be alone and faster."""
    late = Timing(0.0, (*stream(0.5, 0.01, 60).token_s, *stream(1.1, 0.001, 60).token_s), "")
    found = steps_of([stream(0.1, 0.01, 100), late], 10)
    assert found is not None
    assert found.step_s == pytest.approx(0.01, rel=0.03)
    assert (found.batch, found.context) == (2, 2 * (10 + 50))


class Slowing:
    """A client of a stack whose machine is three times slower in the second of three rounds."""

    def __init__(self) -> None:
        self.round = 0
        self.now = 0.0

    async def together(self, count: int, input_tokens: int, output_tokens: int) -> list[Timing]:
        times = 3.0 if self.round == 1 else 1.0
        first_s, step_s = times * 0.001 * input_tokens, times * 0.002 * count
        began = self.now
        is_long = output_tokens == SHARED_OUTPUT
        self.now += 0.0 if is_long else first_s
        for _ in range(6 if is_long else 1):  # prompts come meanwhile
            await asyncio.sleep(0)
        token_s = tuple(began + first_s + step_s * number for number in range(output_tokens))
        return [Timing(began, token_s, "disaggregated") for _ in range(count)]


async def test_a_slow_round_changes_no_median() -> None:
    client: Any = Slowing()
    rounds = Rounds()
    for number in range(3):
        client.round = number
        await rounds.add(client)
    assert rounds.first_s(512) == pytest.approx(0.512)
    assert rounds.handoff_s(512) == pytest.approx(0.002)
    assert {key: median_step(each).step_s for key, each in rounds.steps.items()} == {
        (1, TINY): pytest.approx(0.002),
        (4, TINY): pytest.approx(0.008),
        (8, TINY): pytest.approx(0.016),
        (4, LONG_CONTEXT): pytest.approx(0.008),
    }
    assert rounds.median_beside.first_s == pytest.approx(0.512)
    assert rounds.spread == pytest.approx(0.0)


def test_no_step_without_time_together() -> None:
    assert steps_of([stream(0.1, 0.01, 50), stream(0.5, 0.01, 50)], 10) is None
    assert steps_of([stream(0.1, 0.01, 50), stream(5.0, 0.01, 50)], 10) is None


def test_costs_of_a_step_are_found_again() -> None:
    cost = fit_decode(SHORT, LONG)
    assert cost.constant == pytest.approx(STEP_S)
    assert cost.per_sequence == pytest.approx(PER_SEQUENCE_S, rel=0.01)
    assert cost.per_token == pytest.approx(PER_TOKEN_S, rel=0.01)


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
        costs=dataclasses.replace(COSTS, front=dataclasses.replace(FRONT, cores=2.0)),
    )
    sharing = profile_of(seen).sharing
    assert sharing is not None
    assert sharing.prefill == pytest.approx(1.5 * 0.8, rel=0.01)
    assert sharing.decode == pytest.approx(1.25, rel=0.01)
    assert (sharing.front, sharing.loop) == (seen.costs.front, LOOP)


@pytest.mark.parametrize(("share", "cores"), [(0.6, 0.6), (1.3, 1.0), (0.0, LEAST_CORES)])
def test_a_prompt_uses_the_cores_that_its_engine_used(share: float, cores: float) -> None:
    costs = dataclasses.replace(COSTS, prompt_cpu_s=share * 0.001 * LONG_LENGTH)
    sharing = profile_of(dataclasses.replace(measured(), costs=costs)).sharing
    assert sharing is not None
    assert sharing.prompt_cores == pytest.approx(cores)


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


def test_spread_is_relative_and_one_late_run_is_not_all_of_it() -> None:
    draw = random.Random(1)
    assert spread_of([draw.gauss(2.0, 0.2) for _ in range(2000)]) == pytest.approx(0.1, rel=0.1)
    assert spread_of([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
