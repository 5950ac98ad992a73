"""Decode steps that are taken many at a time end and decide as those taken one by one."""

from __future__ import annotations

import random

import pytest

from kvmesh.policy.lengths import LengthDistribution
from kvmesh.sim.decoding import DecodingSet
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario, parse_failures
from kvmesh.sim.simulation import Result, simulate
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.workload import Workload, make_requests

LENGTHS = LengthDistribution.log_normal(7.5, 1.0, 64, 16_384)
PRESSED = "home:a100:prefill:2,home:a100:decode:1,home:a100:hybrid:1"


def run(seed: int, system: str, fleet: str) -> Result:
    draw = random.Random(seed)
    rate, output_tokens = draw.uniform(1.0, 6.0), draw.choice((20, 200, 600))
    load = Workload(150, rate, LENGTHS, output_tokens=output_tokens, turns=3, num_shared=8)
    return simulate(
        Scenario(
            load_profile("flowkv"),
            parse_fleet(fleet),
            SYSTEMS[system],
            make_requests(load, seed),
            failures=parse_failures("7:kill:1,15:restart:1,20:kill:2,24:restart:2"),
            seed=seed,
        )
    )


def what_was_decided(request: SimRequest) -> tuple[object, ...]:
    return (
        request.prefill_on,
        request.decode_on,
        request.cached_tokens,
        request.outcome,
        request.refusal,
        request.attempt,
        request.num_offers,
    )


def moments(request: SimRequest) -> list[float]:
    """When it was placed, began and ended; -1 for never."""
    found = (request.placed_s, request.first_token_s, request.finished_s)
    return [-1.0 if each is None else each for each in found]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fleet", ["home:a100:prefill:3,home:a100:decode:3", PRESSED])
@pytest.mark.parametrize("system", ["kvmesh", "cache_aware", "joint"])
def test_many_steps_at_a_time_are_as_many_one_by_one(
    monkeypatch: pytest.MonkeyPatch, system: str, fleet: str, seed: int
) -> None:
    many = run(seed, system, fleet)
    monkeypatch.setattr(DecodingSet, "steps_to_next", lambda _: 1)
    single = run(seed, system, fleet)
    assert single.num_events > 1.2 * many.num_events, "steps were taken one by one"
    assert many.reasons == single.reasons
    for ours, theirs in zip(many.requests, single.requests, strict=True):
        assert what_was_decided(ours) == what_was_decided(theirs)
        assert moments(ours) == pytest.approx(moments(theirs), rel=1e-9)
