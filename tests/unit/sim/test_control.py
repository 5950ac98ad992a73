from __future__ import annotations

import dataclasses
import math

from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.offload import AdjustReason
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.sim.fleet import parse_fleet
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.scenario import Objectives, Scenario, parse_failures
from kvmesh.sim.simulation import Simulation, simulate
from kvmesh.sim.systems import SYSTEMS, Offload
from kvmesh.sim.workload import Workload, make_requests
from tests.unit.sim.examples import scenario, trace

PATIENT = Objectives((TimeoutTier(1 << 62, 30.0),))


def two_clusters(system: str, **changes: object) -> Scenario:
    requests = [trace(0.45 * n, 1 + n % 8, 2, first_id=100 * n) for n in range(200)]
    return scenario(
        *requests,
        fleet="remote:d:prefill:3,home:d:prefill:3,home:d:decode:2",
        system=system,
        objectives=PATIENT,
        sample_s=1.0,
        **changes,  # type: ignore[arg-type]
    )


class TestThreshold:
    def test_the_start_balances_the_clusters(self) -> None:
        simulation = Simulation(two_clusters("prfaas"))
        assert 1000 < simulation.control.threshold_tokens < 4000

    def test_fixed_ends(self) -> None:
        assert Simulation(two_clusters("all_remote")).control.threshold_tokens == 0
        assert math.isinf(Simulation(two_clusters("all_local")).control.threshold_tokens)

    def test_a_link_that_drops_raises_it_and_it_returns(self) -> None:
        failures = parse_failures("20:link:0.1,40:link:1")
        result = simulate(two_clusters("prfaas", failures=failures))
        by_second = {round(each.at_s): each.threshold_tokens for each in result.samples}
        assert by_second[38] > 1.5 * by_second[19]
        assert result.reasons[f"threshold: {AdjustReason.LINK_FULL.value}"] > 3
        assert result.reasons[f"threshold: {AdjustReason.RECOVERING.value}"] > 3

    def test_a_static_one_stays(self) -> None:
        failures = parse_failures("20:link:0.1")
        result = simulate(two_clusters("cache_load", failures=failures))
        assert len({each.threshold_tokens for each in result.samples}) == 1


class TestRoles:
    FLEET = "home:d:prefill:4,home:d:decode:4"

    def shifting(self, system: str) -> Scenario:
        """Long prompts with short answers, then the opposite."""
        first = [trace(0.4 * n, 6, 2, first_id=100 * n) for n in range(120)]
        then = [trace(100 + 0.4 * n, 1, 1000, first_id=10**5 + 100 * n) for n in range(100)]
        return scenario(
            *first, *then, fleet=self.FLEET, system=system, objectives=PATIENT, sample_s=1.0
        )

    def test_idle_workers_help_and_return(self) -> None:
        fixed, helped = simulate(self.shifting("cache_load")), simulate(self.shifting("flowkv"))
        counts = {each.roles["prefill"] for each in helped.samples}
        assert max(counts) > 4, "decode workers helped prefill"
        assert min(counts) < 4, "prefill workers helped decode"
        assert {each.roles["prefill"] for each in fixed.samples} == {4}
        assert any(reason.startswith("switch: the side it helped") for reason in helped.reasons)

        def mean_ttft(requests: list[float | None]) -> float:
            return sum(each or 0.0 for each in requests) / len(requests)

        waits = [
            mean_ttft([each.ttft_s for each in result.requests[:120]]) for result in (fixed, helped)
        ]
        assert waits[1] < 0.7 * waits[0]

    def test_roles_do_not_flap_where_both_sides_are_full(self) -> None:
        """More than two and two can decode: what prefill can spare is never enough for long."""
        lengths = LengthDistribution.log_normal(6.5, 0.8, 64, 16_384)
        system = dataclasses.replace(SYSTEMS["kvmesh"], reallocate=False)
        result = simulate(
            Scenario(
                load_profile("flowkv"),
                parse_fleet("home:a100:prefill:2,home:a100:decode:2"),
                system,
                make_requests(Workload(800, 20.0, lengths, output_tokens=600), 1),
            )
        )
        begun = sum(n for reason, n in result.reasons.items() if "idle, and" in reason)
        assert result.finished_s > 60, "it was overloaded all the while"
        assert 1 <= begun <= 3

    def test_reallocation_follows_the_lengths(self) -> None:
        system = dataclasses.replace(SYSTEMS["prfaas"], offload=Offload.NONE)
        # Prefill needs half a second per request and decode 0.02: two cannot prefill five a second.
        requests = [trace(0.2 * n, 1, 2, first_id=100 * n) for n in range(750)]
        made = scenario(*requests, fleet="home:d:prefill:2,home:d:decode:6", objectives=PATIENT)
        result = simulate(dataclasses.replace(made, system=system))
        assert result.samples[-1].roles["prefill"] > 2
        assert result.reasons["reallocation: prefill makes less than decode can take"] >= 1
        switching = dataclasses.replace(system, switch_roles=True)
        result = simulate(dataclasses.replace(made, system=switching))
        assert not [each for each in result.reasons if each.startswith("reallocation")]
