from __future__ import annotations

from kvmesh.core.types import Role
from kvmesh.policy.pdserve import RatioReason, TimeoutTier
from kvmesh.sim.scenario import Objectives
from kvmesh.sim.simulation import Simulation, simulate
from tests.unit.sim.examples import scenario, trace

PATIENT = Objectives((TimeoutTier(1 << 62, 1e6),))


def test_prompts_that_pile_up_get_an_instance() -> None:
    # Each prompt takes two seconds and decode two more; one prefill worker is too few.
    requests = [trace(1.0 * n, 4, 200, first_id=100 * n) for n in range(90)]
    fleet = "home:d:prefill:1,home:d:decode:4"
    result = simulate(scenario(*requests, fleet=fleet, system="pdserve", objectives=PATIENT))
    assert result.reasons[f"monitor: {RatioReason.BY_RATE.value}"] > 0
    assert result.samples[-1].roles["prefill"] > 1


def test_an_instance_that_was_given_is_not_taken_back_while_the_load_lasts() -> None:
    # Prompts of two seconds, one each 0.8 s: two prefill workers are too few, three or four do.
    requests = [trace(0.8 * n, 4, 20, first_id=100 * n) for n in range(300)]
    fleet = "home:d:prefill:2,home:d:decode:4"
    result = simulate(scenario(*requests, fleet=fleet, system="pdserve", objectives=PATIENT))
    for reason in (RatioReason.DECODE_GREW, RatioReason.TAKEN_BACK):
        assert result.reasons[f"monitor: {reason.value}"] == 0
    prefilling = [each.roles["prefill"] for each in result.samples]
    assert prefilling == sorted(prefilling)
    assert prefilling[-1] > 2
    waited = [each.ttft_s for each in result.requests if each.ttft_s is not None]
    assert max(waited) > 6.0
    assert max(waited[-50:]) < 4.0, "what had queued up is served"


def test_a_scenario_stays_in_its_group() -> None:
    requests = [
        trace(0.1 * n, 2, 3, first_id=100 * n, scenario="chat" if n % 3 else "code")
        for n in range(30)
    ]
    fleet = "chat:d:prefill:2,chat:d:decode:2,code:d:prefill:1,code:d:decode:1"
    simulation = Simulation(scenario(*requests, fleet=fleet, system="pdserve", objectives=PATIENT))
    result = simulation.run()
    for each in result.requests:
        assert each.prefill_on is not None
        assert each.prefill_on.startswith(each.trace.scenario)
    assert all(worker.pool.is_idle for worker in simulation.fleet.living())


def test_a_scenario_without_a_group_may_go_anywhere() -> None:
    fleet = "chat:d:prefill:1,chat:d:decode:1"
    done = simulate(scenario(trace(scenario="other"), fleet=fleet, system="pdserve"))
    assert done.requests[0].prefill_on == "chat-prefill-0"


def test_the_ratio_of_one_group_takes_nobody_from_another() -> None:
    # Prompts pile up in one group. Its own decode workers help, those of the idle group do not.
    requests = [trace(1.0 * n, 4, 20, first_id=100 * n, scenario="code") for n in range(90)] + [
        trace(5.0 * n, 1, 20, first_id=10**6 + 100 * n, scenario="chat") for n in range(18)
    ]
    fleet = "chat:d:prefill:2,chat:d:decode:4,code:d:prefill:1,code:d:decode:4"
    simulation = Simulation(scenario(*requests, fleet=fleet, system="pdserve", objectives=PATIENT))
    simulation.run()
    prefill = [
        worker.info.worker_id
        for worker in simulation.fleet.living()
        if worker.info.role is Role.PREFILL
    ]
    assert sum(each.startswith("code") for each in prefill) > 1
    assert sum(each.startswith("chat") for each in prefill) == 2
