from __future__ import annotations

import dataclasses

import pytest

from kvmesh.core.types import RefusalReason, WorkerId
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.policy.prefill_times import MAX_SHARE, WAY_SHARE
from kvmesh.sim.profile import DecodeCost
from kvmesh.sim.requests import Outcome
from kvmesh.sim.scenario import Objectives, Scenario, parse_failures
from kvmesh.sim.simulation import Result, Simulation
from kvmesh.sim.steps import ChunkTokens
from kvmesh.sim.systems import SYSTEMS, Deadlines
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from tests.unit.sim.examples import request, scenario, trace

QUICK = Objectives((TimeoutTier(1 << 62, 2.0),))
PATIENT = (TimeoutTier(1 << 62, 1e6),)
TWO_CLUSTERS = "remote:d:prefill:1,home:d:prefill:1,home:d:decode:1"


def run(what: Scenario) -> Result:
    """Runs and checks that nothing is left behind."""
    simulation = Simulation(what)
    result = simulation.run()
    assert all(each.outcome is not None for each in result.requests)
    simulation.events.run(lambda: simulation.events.now() > result.finished_s + 60)
    for worker in simulation.fleet.living():
        worker.pool.check_integrity()
        worker.handoff.check_integrity()
        assert worker.pool.is_idle, worker.info.worker_id
        assert worker.handoff.is_idle
        assert worker.load().prefill_active == worker.load().decode_running == 0
        assert worker.load().prefill_sending == worker.load().sending_bytes == 0
    return result


class TestOneRequest:
    def test_one_that_asks_again_is_load_once_and_not_for_itself(self) -> None:
        fleet = "home:d:prefill:2,home:d:decode:1"
        simulation = Simulation(scenario(trace(), fleet=fleet, system="pending_tokens"))
        simulation.fleet.view()
        for _ in range(3):
            simulation._desk.route(request(), frozenset(), lambda _: None)
            seen = simulation.fleet.view().workers
            assert sorted(each.prefill_in_flight for each in seen) == [0, 0, 1]
            assert sorted(each.decode_in_flight for each in seen) == [0, 0, 1]

    def test_prefill_transfer_and_decode_take_their_times(self) -> None:
        (request,) = run(scenario(trace(blocks=2, output=5))).requests
        assert request.outcome is Outcome.DONE
        assert request.ttft_s == pytest.approx(1.025)
        assert request.finished_s is not None
        # Three blocks of 5.12 ms, then four steps.
        assert request.finished_s == pytest.approx(1.025 + 3 * 0.00512 + 4 * 0.01)
        assert request.tpot_s == pytest.approx((3 * 0.00512 + 4 * 0.01) / 4)

    def test_transfer_overlaps_prefill_in_chunks(self) -> None:
        chunks = ChunkTokens(TRACE_BLOCK)
        (request,) = run(scenario(trace(blocks=4, output=2), chunks=chunks)).requests
        assert request.finished_s is not None
        # The last token is a step of its own, and only its block is left to be sent after it.
        assert request.finished_s == pytest.approx(2.048 + 0.01 + 0.00512 + 0.01)

    def test_one_token_needs_no_transfer(self) -> None:
        (request,) = run(scenario(trace(blocks=2, output=1))).requests
        assert request.finished_s == request.first_token_s == pytest.approx(1.025)

    def test_a_hybrid_worker_does_it_alone(self) -> None:
        (request,) = run(scenario(trace(blocks=2, output=5), fleet="home:d:hybrid:1")).requests
        assert request.prefill_on == request.decode_on
        assert request.finished_s == pytest.approx(1.025 + 0.04)

    def test_a_prompt_that_fits_nowhere(self) -> None:
        (request,) = run(scenario(trace(blocks=64))).requests
        assert (request.outcome, request.refusal) == (Outcome.REFUSED, RefusalReason.TOO_LONG)

    def test_no_decode_worker_and_no_time(self) -> None:
        made = scenario(trace(), fleet="home:d:prefill:0", objectives=QUICK)
        (request,) = run(made).requests
        assert (request.outcome, request.refusal) == (Outcome.REFUSED, RefusalReason.NO_WORKERS)
        assert request.finished_s == pytest.approx(2.0 * (1 - WAY_SHARE))


class TestWaiting:
    def test_rejected_prompts_wait_at_the_gateway(self) -> None:
        requests = [trace(first_id=10 * n, blocks=1, output=2) for n in range(6)]
        result = run(scenario(*requests))
        assert {each.outcome for each in result.requests} == {Outcome.DONE}
        assert max(each.num_offers for each in result.requests) > 1
        placed = sorted(each.placed_s or 0.0 for each in result.requests)
        assert placed[:2] == [0.0, 0.0], "as many as there are slots"
        assert placed[2] > 0.5

    @pytest.mark.parametrize(
        ("deadlines", "least_s", "most_s"),
        [
            (Deadlines.TIMEOUT, 1.97, 2.03),
            # At most half of the limit is kept for a prompt that takes longer than that.
            (Deadlines.EARLY_ABORT, 2.0 * (1 - MAX_SHARE), 2.0 * (1 - WAY_SHARE)),
            (Deadlines.ADMISSION, 2.0 * (1 - MAX_SHARE), 2.0 * (1 - WAY_SHARE)),
        ],
    )
    def test_who_waits_too_long_is_refused_once(
        self, deadlines: Deadlines, least_s: float, most_s: float
    ) -> None:
        requests = [trace(first_id=10 * n, blocks=2, output=2) for n in range(9)]
        what = scenario(*requests, objectives=QUICK)
        system = dataclasses.replace(what.system, deadlines=deadlines)
        result = run(dataclasses.replace(what, system=system))
        refused = [each for each in result.requests if each.outcome is Outcome.REFUSED]
        assert refused
        for each in refused:
            # The last ones were behind those whose turn it was.
            expected = {RefusalReason.BUSY, RefusalReason.NO_SLOTS, RefusalReason.DEADLINE}
            assert each.refusal in expected
            assert each.finished_s is not None
            assert least_s <= each.finished_s <= most_s

    @pytest.mark.parametrize("fleet", ["home:d:prefill:1,home:d:decode:1", "home:d:hybrid:1"])
    def test_local_queues_begin_no_prompt_in_vain(self, fleet: str) -> None:
        requests = [trace(first_id=10 * n, blocks=2, output=2) for n in range(4)]
        chunks = ChunkTokens(TRACE_BLOCK, TRACE_BLOCK)  # one prompt after the other
        what = scenario(
            *requests, system="cache_aware", objectives=QUICK, fleet=fleet, chunks=chunks
        )
        outcomes = [each.outcome for each in run(what).requests]
        assert outcomes == [Outcome.DONE, *3 * [Outcome.REFUSED]]
        waits = dataclasses.replace(what.system, deadlines=Deadlines.TIMEOUT)
        outcomes = [each.outcome for each in run(dataclasses.replace(what, system=waits)).requests]
        assert outcomes == [Outcome.DONE, Outcome.LATE, Outcome.REFUSED, Outcome.REFUSED]

    def test_a_gateway_refuses_whom_the_crowd_before_would_make_late(self) -> None:
        crowd = [trace(first_id=10 * n, blocks=2, output=2) for n in range(120)]
        later = [trace(20.0 + n, first_id=9000 + 10 * n, blocks=2, output=2) for n in range(5)]
        limit = Objectives((TimeoutTier(1 << 62, 45.0),))
        what = scenario(*crowd, *later, objectives=limit)
        for each in run(what).requests[-5:]:
            assert each.refusal is RefusalReason.BUSY
            assert each.finished_s == each.arrival_s
        for deadlines in (Deadlines.TIMEOUT, Deadlines.EARLY_ABORT):
            waits = dataclasses.replace(what.system, deadlines=deadlines)
            waited = run(dataclasses.replace(what, system=waits))
            assert all(each.finished_s != each.arrival_s for each in waited.requests)

    def test_a_client_that_is_refused_waits_before_it_asks_again(self) -> None:
        crowd = [trace(first_id=10 * n, blocks=2, output=2) for n in range(120)]
        turns = [trace(20.0, 2, 2, 9000 + 10 * n, session="s") for n in range(2)]
        limit = Objectives((TimeoutTier(1 << 62, 45.0),))
        result = run(scenario(*crowd, *turns, objectives=limit, closed_loop=True))
        refused, again = result.requests[-2:]
        assert refused.refusal is RefusalReason.BUSY
        # As many were waiting as would take longer than its limit.
        assert again.arrival_s - refused.arrival_s > 45.0
        assert again.outcome is Outcome.DONE

    def test_early_rejection_tells_at_once_who_would_be_late(self) -> None:
        requests = [trace(0.01 * n, first_id=10 * n, blocks=2, output=2) for n in range(4)]
        result = run(scenario(*requests, system="cache_centric", objectives=QUICK))
        refused = [each for each in result.requests if each.outcome is Outcome.REFUSED]
        assert refused
        for each in refused:
            assert each.refusal is RefusalReason.DEADLINE
            assert each.finished_s == pytest.approx(each.arrival_s, abs=0.01)


class TestTimePerToken:
    def test_a_long_prompt_joins_those_that_have_little_context(self) -> None:
        short = [TraceRequest(0.5 * n, 20, 400, (n,)) for n in range(4)]
        long = TraceRequest(4.0, 8000, 10, tuple(range(10, 26)))
        device = {"decode": DecodeCost(0.01, 0.01, 1e-7), "decode_slots": 8}
        made = scenario(*short, long, system="kvmesh", device=device)
        *first, last = run(made).requests
        assert last.finished_s is not None
        assert last.outcome is not Outcome.REFUSED
        assert last.finished_s < min(each.finished_s or 0.0 for each in first)


class TestCache:
    def test_a_prefix_is_found_where_it_is(self) -> None:
        pair = [trace(0.0, 4), trace(9.0, 4)]
        result = run(scenario(*pair, fleet="home:d:prefill:3,home:d:decode:1"))
        first, second = result.requests
        assert second.prefill_on == first.prefill_on
        assert second.cached_tokens == 4 * TRACE_BLOCK

    def test_the_decode_worker_keeps_it_too(self) -> None:
        result = run(scenario(trace(0.0, 4), trace(9.0, 4)))
        first, second = result.requests
        assert first.finished_s is not None
        assert second.finished_s is not None
        assert second.tpot_s is not None
        assert first.tpot_s is not None
        assert second.tpot_s < first.tpot_s, "one block travels instead of five"

    def test_sessions_in_a_closed_loop(self) -> None:
        turns = [
            TraceRequest(0.0, 600, 11, (1, 2), "s", 0),
            TraceRequest(0.1, 1200, 2, (1, 3, 4), "s", 1, think_s=5.0),
        ]
        first, second = run(scenario(*turns, closed_loop=True)).requests
        assert first.finished_s is not None
        assert second.arrival_s == pytest.approx(first.finished_s + 5.0)
        assert second.cached_tokens == TRACE_BLOCK


class TestClusters:
    def test_the_threshold_divides_prompts(self) -> None:
        requests = [
            trace(10.0 * n, blocks, first_id=100 * n) for n, blocks in enumerate((1, 8, 1, 8))
        ]
        made = scenario(*requests, fleet=TWO_CLUSTERS)
        result = run(made)
        assert [each.remote for each in result.requests] == [False, True, False, True]
        assert {each.prefill_on for each in result.requests if each.remote} == {"remote-prefill-0"}
        sizes = sum(9 * TRACE_BLOCK * 1000 for each in result.requests if each.remote)
        assert result.link_bytes == pytest.approx(sizes)

    def test_who_has_the_link_alone_sends_for_as_long_as_it_is_busy(self) -> None:
        requests = [trace(0.3 * n, 1 + n % 3, first_id=100 * n) for n in range(6)]
        simulation = Simulation(scenario(*requests, fleet=TWO_CLUSTERS, system="all_remote"))
        simulation.run()
        sender = simulation.fleet.workers[WorkerId("remote-prefill-0")]
        busy_s = simulation.fleet.between.use_until_now()[1]
        assert busy_s > 0.3
        for later_s in (0, 60):
            now = simulation.events.now() + later_s
            assert sender.sending.seconds(now) == pytest.approx(busy_s)

    @pytest.mark.parametrize(("system", "remote"), [("all_remote", True), ("all_local", False)])
    def test_ends_of_the_scale(self, system: str, remote: bool) -> None:
        requests = [trace(10.0 * n, 1 + n, first_id=100 * n) for n in range(4)]
        result = run(scenario(*requests, fleet=TWO_CLUSTERS, system=system))
        assert {each.remote for each in result.requests} == {remote}

    def test_what_would_wait_for_the_link_is_computed_by_who_idles_at_home(self) -> None:
        """Routes see that all slots of the far worker hold KV that has not left."""
        requests = [trace(at, 2, first_id=n) for at, n in ((0.0, 0), (1.5, 100), (5.0, 200))]
        made = scenario(
            *requests,
            fleet=TWO_CLUSTERS,
            system="all_remote",
            failures=parse_failures("0:link:0.01"),
            objectives=Objectives((TimeoutTier(1 << 62, 600.0),)),
        )
        simulation = Simulation(made)
        seen = []
        block_bytes = next(iter(simulation.fleet.workers.values())).info.layout.block_bytes

        def look() -> None:
            (far,) = (
                each for each in simulation.fleet.view().workers if "remote" in each.worker_id
            )
            seen.append((far.load.prefill_sending, far.load.sending_bytes / block_bytes))

        for at in (1.0, 2.0, 4.0):
            simulation.events.at(at, look)
        simulation.run()
        assert seen == [(0, 0), (1, 3), (2, 6)]
        prefill_on = [each.prefill_on for each in simulation.result.requests]
        assert prefill_on == [*2 * ["remote-prefill-0"], "home-prefill-1"]

    def test_only_the_link_out_of_the_remote_cluster_fails(self) -> None:
        made = scenario(trace(), fleet=TWO_CLUSTERS, failures=parse_failures("0:link:0.1"))
        simulation = Simulation(made)
        out, back = ("home", "remote"), ("remote", "home")
        assert simulation._router._pace.share(*out) == simulation._router._pace.share(*back)
        simulation._fail(made.failures[0])
        pace = simulation._router._pace
        assert pace.share(*back) == pytest.approx(10 * pace.share(*out))

    def test_a_slow_link_delays_decode_only(self) -> None:
        failures = parse_failures("0:link:0.1")
        made = scenario(trace(blocks=2), fleet=TWO_CLUSTERS, system="all_remote", failures=failures)
        (request,) = run(made).requests
        assert request.ttft_s == pytest.approx(1.025)
        assert request.finished_s == pytest.approx(1.025 + 3 * 0.512 + 2 * 0.01)


class TestFailures:
    FLEET = "home:d:prefill:2,home:d:decode:2"

    def test_a_dead_decode_worker_s_streams_go_on_elsewhere(self) -> None:
        made = scenario(trace(blocks=1, output=200), fleet=self.FLEET)
        undisturbed = run(made).requests[0]
        index = int(str(undisturbed.decode_on).rsplit("-", 1)[1])
        failures = parse_failures(f"1.5:kill:{index}")
        made = scenario(trace(blocks=1, output=200), fleet=self.FLEET, failures=failures)
        (moved,) = run(made).requests
        assert moved.outcome is Outcome.DONE
        assert moved.decode_on != undisturbed.decode_on
        assert moved.attempt == 1
        assert 90 < moved.generated < 110, "tokens that the client had by then"
        assert moved.first_token_s == undisturbed.first_token_s

    def test_a_dead_prefill_worker_s_prompts_start_again(self) -> None:
        made = scenario(
            trace(blocks=2),
            fleet=self.FLEET,
            failures=parse_failures("0.5:kill:0,0.5:kill:1,0.6:restart:1"),
        )
        (request,) = run(made).requests
        assert request.outcome is Outcome.DONE
        assert request.prefill_on == "home-prefill-1"
        assert request.ttft_s is not None
        assert request.ttft_s > 1.6

    def test_a_transfer_to_the_dead_is_dropped(self) -> None:
        made = scenario(
            trace(blocks=8, output=4),
            fleet=self.FLEET + ",remote:d:prefill:1",
            system="all_remote",
            failures=parse_failures("4.2:kill:2,4.3:kill:3,4.4:restart:2"),
        )
        (request,) = run(made).requests
        assert request.outcome is Outcome.DONE
        assert request.attempt >= 1

    def test_all_dead_is_an_honest_refusal(self) -> None:
        failures = parse_failures("0.5:kill:0,0.5:kill:1")
        (request,) = run(scenario(trace(), failures=failures, objectives=QUICK)).requests
        assert request.outcome is Outcome.REFUSED

    def test_killing_nobody_changes_nothing(self) -> None:
        (request,) = run(scenario(trace(), failures=parse_failures("0.1:kill:99"))).requests
        assert request.outcome is Outcome.DONE


def busy(system: str, seed: int = 0) -> Scenario:
    requests = [
        trace(0.07 * n, blocks=1 + n % 5, output=5 + n % 40, first_id=1000 * (n % 30))
        for n in range(150)
    ]
    return scenario(
        *requests,
        fleet="remote:d:prefill:2,home:d:prefill:4,home:d:decode:4",
        system=system,
        seed=seed,
        jitter=0.2,
        device={"num_blocks": 30},
        failures=parse_failures("2:kill:3,4:restart:3,5:kill:7,6:link:0.3,8:link:1,9:restart:7"),
        sample_s=1.0,
    )


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_every_system_ends_clean_after_overload_and_failures(system: str) -> None:
    result = run(busy(system))
    assert len(result.requests) == 150
    assert any(each.outcome is Outcome.DONE for each in result.requests)


@pytest.mark.parametrize("fleet", ["home:d:prefill:2,home:d:decode:2", "home:d:hybrid:3"])
def test_workers_count_the_tokens_that_they_generate(fleet: str) -> None:
    requests = [trace(0.2 * n, 1 + n % 3, 5 + 30 * (n % 9), 100 * n) for n in range(60)]
    what = scenario(
        *requests, fleet=fleet, device={"num_blocks": 12}, objectives=Objectives(PATIENT)
    )
    simulation = Simulation(what)
    simulation.run()
    counted = sum(each.steps.generated_tokens for each in simulation.fleet.workers.values())
    assert counted == sum(each.output_tokens for each in requests)


def test_equal_seeds_give_equal_runs() -> None:
    def signature(result: Result) -> list[object]:
        return [
            (each.prefill_on, each.decode_on, each.finished_s, each.outcome, each.num_offers)
            for each in result.requests
        ]

    assert signature(run(busy("kvmesh"))) == signature(run(busy("kvmesh")))
    assert signature(run(busy("kvmesh"))) != signature(run(busy("kvmesh", seed=1)))


def test_an_answer_ends_where_the_longest_sequence_does() -> None:
    """Else it would be preempted for room that no worker has."""
    plan = scenario(trace(blocks=5, output=5000), device={"num_blocks": 6})
    (only,) = Simulation(plan).run().requests
    assert only.outcome is Outcome.DONE
    assert only.trace.output_tokens == TRACE_BLOCK - 1
