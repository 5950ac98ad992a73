from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import Role, RoutePlan, WorkerId
from kvmesh.policy.fleet_index import WIDTH, FleetIndex
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import plan_offload
from kvmesh.policy.routing import plan_route
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import WorkerView
from tests.unit.policy.fleet_examples import NOW, POLICIES, query, worker


def index_of(*workers: WorkerView, seed: int = 0) -> FleetIndex:
    index = FleetIndex(random.Random(seed))
    for each in workers:
        index.update(each)
    return index


def names(index: FleetIndex, **held: int) -> list[str]:
    matches = {WorkerId(name): blocks for name, blocks in held.items()}
    view = index.shortlist(query(), matches, NOW, SILENT_AFTER_S)
    return sorted(each.worker_id for each in view.workers)


def test_a_few_of_each_side() -> None:
    many = [worker(f"p{n:02}", prefill_active=n % 4) for n in range(30)]
    decode = [worker(f"d{n:02}", Role.DECODE, decode_running=n % 8) for n in range(30)]
    listed = names(index_of(*many, *decode))
    assert Counter(name[0] for name in listed) == {"p": WIDTH, "d": WIDTH}


def test_a_holder_is_listed_however_loaded() -> None:
    many = [worker(f"p{n:02}") for n in range(30)]
    index = index_of(worker("held", prefill_active=3), *many, worker("d", Role.DECODE))
    assert "held" in names(index, held=20)
    assert "held" not in names(index)


def test_who_lost_work_of_the_request_is_listed() -> None:
    """A prompt that another cluster lost stays at home while its worker is there."""
    far = [worker(f"far{n:02}", cluster="far") for n in range(30)]
    lost = worker("lost", cluster="far", prefill_active=3)
    index = index_of(lost, *far, worker("p"), worker("d", Role.DECODE))
    gone = frozenset({lost.worker_id, WorkerId("gone")})
    asked = dataclasses.replace(query(500), avoid=gone, lost=gone)
    view = index.shortlist(asked, None, NOW, SILENT_AFTER_S)
    assert "lost" in [each.worker_id for each in view.workers]
    policy, rng = POLICIES["cache_load"], random.Random(0)
    plan = plan_offload(view, asked, None, NOW, rng, policy, OffloadState("far", 400)).route
    assert isinstance(plan, RoutePlan)
    assert plan.prefill[0].worker_id == "p"


def test_the_silent_and_avoided_do_not_fill_the_list() -> None:
    silent = [worker(f"s{n}", reported_at=NOW - 9) for n in range(20)]
    busy = [worker(f"b{n}", prefill_active=2) for n in range(3)]
    listed = names(index_of(*silent, *busy, worker("d", Role.DECODE)))
    assert {"b0", "b1", "b2"} <= set(listed)


def test_hybrids_beside_dedicated_workers_need_all() -> None:
    mixed = [worker(f"h{n:02}", Role.HYBRID) for n in range(20)]
    assert len(names(index_of(*mixed, worker("p")))) == 21


def test_hybrids_that_decode_under_a_limit_are_listed_from_the_fullest() -> None:
    roomy = PaceRoom(StepPace(0.01, 1e-7), 5000, strictest_s=0.03)
    no_room = dataclasses.replace(roomy, context_tokens=200_000)
    some = [
        worker(f"h{n:02}", Role.HYBRID, decode_running=n, decode_slots=64, room=roomy)
        for n in range(20)
    ]
    load = {"prefill_active": 1, "decode_running": 30}
    stuck = worker("stuck", Role.HYBRID, decode_slots=64, room=no_room, **load)
    index = index_of(*some, stuck)
    without = index.shortlist(query(), None, NOW, SILENT_AFTER_S)
    listed = index.shortlist(query(tpot_s=0.03), None, NOW, SILENT_AFTER_S)
    fullest = {f"h{n:02}" for n in range(20 - WIDTH, 20)}
    assert {each.worker_id for each in listed.workers} >= fullest
    assert not fullest <= {each.worker_id for each in without.workers}
    assert "stuck" not in {each.worker_id for each in listed.workers}


def test_equal_workers_take_turns() -> None:
    index = index_of(*(worker(f"p{n:03}") for n in range(100)), worker("d", Role.DECODE))
    chosen: Counter[str] = Counter()
    for seed in range(200):
        view = index.shortlist(query(), None, NOW, SILENT_AFTER_S)
        rng = random.Random(seed)
        plan = plan_route(view, query(), None, NOW, rng, POLICIES["cache_load"])
        assert isinstance(plan, RoutePlan)
        first = plan.prefill[0].worker_id
        chosen[first] += 1
        # The load that the plan brings, and its end.
        index.update(worker(first, prefill_active=1))
        index.update(worker(first))
    assert len(chosen) > 50


def test_a_holder_that_leaves_does_not_hide_those_that_can_be_read() -> None:
    idle = [worker(f"idle{n:02}") for n in range(2 * WIDTH)]
    busy = [worker(name, prefill_active=8) for name in ("busy0", "busy1")]
    leaving = worker("leaving", draining=True, prefill_active=8)
    held = {WorkerId(name): 8 for name in ("busy0", "busy1", "leaving")}
    held |= {each.worker_id: 7 for each in idle}
    index = index_of(*idle, *busy, leaving)
    listed = index.shortlist(query(200), held, NOW, SILENT_AFTER_S).workers
    assert {"busy0", "busy1"} <= {each.worker_id for each in listed}


def test_a_thousand_workers_are_no_slower_than_a_few() -> None:
    """A bound far above what it takes, so that a busy machine does not fail it."""
    numbers = random.Random(0)
    roles = (Role.PREFILL, Role.DECODE)
    index = index_of(
        *(
            worker(
                f"w{n:04}",
                roles[n % 2],
                prefill_active=numbers.randrange(4),
                decode_running=numbers.randrange(8),
            )
            for n in range(1000)
        )
    )
    held = {WorkerId(f"w{n:04}"): 1 + n % 20 for n in range(0, 1000, 10)}
    taken = []
    for _ in range(100):
        begun = time.process_time()
        view = index.shortlist(query(), held, NOW, SILENT_AFTER_S)
        plan_route(view, query(), held, NOW, numbers, POLICIES["cache_load"])
        taken.append(time.process_time() - begun)
    assert sorted(taken)[50] < 0.01
