from __future__ import annotations

from kvmesh.core.types import Placement, RefusalReason, Role, WorkerId
from kvmesh.policy.composition import COMPOSITIONS, DEFAULT, decide_route
from kvmesh.policy.explain import MAX_EXPLAINED, DecisionFacts, describe_decision
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.view import WorkerView
from tests.unit.policy.fleet_examples import NOW, fleet, query, worker

POLICY = COMPOSITIONS[DEFAULT]


def describe(
    *workers: WorkerView, num_tokens: int = 320, offload: OffloadState | None = None
) -> DecisionFacts:
    view, asked, offload = fleet(*workers), query(num_tokens), offload or OffloadState()
    matches = {WorkerId("p0"): 5}
    decision = decide_route(POLICY, view, asked, matches, NOW, offload)
    return describe_decision(view, asked, decision, POLICY.route, offload)


def test_candidates_in_order_with_the_numbers_that_decided() -> None:
    prefill = [worker(f"p{n}", prefill_active=n) for n in range(6)]
    facts = describe(*prefill, worker("d", Role.DECODE, decode_running=6))
    assert (facts.reason, facts.placement) == ("prefix", Placement.DISAGGREGATED)
    assert (facts.num_tokens, facts.num_seen) == (320, 7)
    assert len(facts.prefill) == MAX_EXPLAINED
    scores = [each.score for each in facts.prefill]
    assert scores == sorted(scores)
    best = facts.prefill[0]
    assert (best.worker_id, best.cached_tokens, best.prefill_used) == ("p0", 80, 0)
    assert best.score[0] == 320 - 80
    assert [each.worker_id for each in facts.decode] == ["d"]
    assert (facts.decode[0].decode_used, facts.decode[0].decode_slots) == (6, 8)


def test_aggregated_has_one_side() -> None:
    facts = describe(worker("p"), worker("d", Role.DECODE), num_tokens=64)
    assert (facts.reason, facts.placement) == ("short_prompt", Placement.AGGREGATED)
    assert facts.decode == ()


def test_refusal() -> None:
    facts = describe()
    assert (facts.reason, facts.placement) == (RefusalReason.NO_WORKERS.value, None)
    assert "no worker" in facts.detail


def test_threshold_only_with_a_remote_cluster() -> None:
    pair = (worker("p"), worker("d", Role.DECODE))
    assert describe(*pair).threshold_tokens is None
    facts = describe(
        worker("far", cluster="west"), *pair, offload=OffloadState("west", 100.0), num_tokens=600
    )
    assert (facts.threshold_tokens, facts.compared_tokens) == (100.0, 600)
    assert facts.reason == "long_prompt"


def test_an_endless_threshold_is_none() -> None:
    far = worker("far", cluster="west")
    for offload in (OffloadState("west"), OffloadState("", 100.0)):
        facts = describe(far, worker("p"), worker("d", Role.DECODE), offload=offload)
        assert facts.threshold_tokens is None
