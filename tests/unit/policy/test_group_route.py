from __future__ import annotations

import dataclasses
from typing import Any

from kvmesh.core.types import Placement, Refusal, RefusalReason, Role, RoutePlan, WorkerId
from kvmesh.policy.composition import COMPOSITIONS, decide_route
from kvmesh.policy.explain import DecisionFacts, describe_decision
from kvmesh.policy.group_route import restrict_to_group
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.pdserve import GroupReason
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import LAYOUT, NOW, fleet, query, worker

POLICY = COMPOSITIONS["forwarding"]


def pair(scenario: str, cluster: str = "east", **load: Any) -> tuple[WorkerView, WorkerView]:
    name = f"{scenario or 'any'}-{cluster}"
    return (
        worker(f"{name}-p", scenario=scenario, cluster=cluster, **load),
        worker(f"{name}-d", Role.DECODE, scenario=scenario, cluster=cluster),
    )


def decide(view: FleetView, scenario: str, num_tokens: int = 320) -> OffloadPlan:
    asked = query(num_tokens, scenario=scenario)
    return decide_route(POLICY, view, asked, {}, NOW, OffloadState())


def chosen(made: OffloadPlan) -> set[WorkerId]:
    assert isinstance(made.route, RoutePlan)
    assert made.route.placement is Placement.DISAGGREGATED
    return {each.worker_id for each in (*made.route.prefill, *made.route.decode)}


def test_a_fleet_without_labels_is_one_group() -> None:
    view = fleet(*pair(""), *pair("", "west"))
    assert restrict_to_group(view, query(scenario="chat")) == (view, None)
    assert decide(view, "chat").group is None


def test_a_request_stays_in_the_group_of_its_scenario() -> None:
    view = fleet(*pair("chat"), *pair("code"), *pair(""))
    for scenario in ("chat", "code"):
        made = decide(view, scenario)
        assert chosen(made) == {f"{scenario}-east-p", f"{scenario}-east-d"}
        assert made.group is not None
        assert made.group.reason is GroupReason.SCENARIO


def test_others_go_to_the_general_group() -> None:
    made = decide(fleet(*pair("chat"), *pair("")), "mail")
    assert chosen(made) == {"any-east-p", "any-east-d"}
    assert made.group is not None
    assert made.group.reason is GroupReason.GENERAL


def test_without_a_general_group_they_may_go_anywhere() -> None:
    made = decide(fleet(*pair("chat"), *pair("code")), "mail")
    assert {"chat-east-p", "code-east-p"} <= chosen(made)
    assert made.group is not None
    assert made.group.reason is GroupReason.NONE


def test_of_two_groups_the_less_busy_one() -> None:
    view = fleet(*pair("chat", prefill_active=3), *pair("chat", "west", prefill_active=1))
    assert "chat-west-p" in chosen(decide(view, "chat"))


def test_a_group_that_drains_or_is_too_small_does_not_count() -> None:
    spare = pair("")
    drains = [
        worker("p", scenario="chat", draining=True),
        worker("d", Role.DECODE, scenario="chat", draining=True),
    ]
    assert chosen(decide(fleet(*drains, *spare), "chat")) == {"any-east-p", "any-east-d"}
    small = [
        worker("p", scenario="chat", max_model_len=100),
        worker("d", Role.DECODE, scenario="chat", max_model_len=100),
    ]
    assert chosen(decide(fleet(*small, *spare), "chat")) == {"any-east-p", "any-east-d"}


def test_the_offload_cluster_prefills_for_all_groups() -> None:
    view = fleet(*pair("chat"), worker("far", cluster="west"))
    asked = query(1500, scenario="chat")
    made = decide_route(POLICY, view, asked, {}, NOW, OffloadState("west", 1000.0))
    assert isinstance(made.route, RoutePlan)
    assert made.route.prefill[0].worker_id == "far"
    assert [each.worker_id for each in made.route.decode] == ["chat-east-d"]


def test_the_facts_name_the_group_and_why() -> None:
    view, asked = fleet(*pair("chat"), *pair("")), query(scenario="chat")
    made = decide_route(POLICY, view, asked, {}, NOW, OffloadState())
    facts: DecisionFacts = describe_decision(view, asked, made, POLICY.route, OffloadState())
    assert (facts.scenario, facts.group) == ("chat", "chat@east")
    assert facts.group_reason is GroupReason.SCENARIO


def test_a_group_of_another_model_does_not_serve_the_scenario() -> None:
    other = [
        worker("other-p", scenario="chat", cluster="west", model="other"),
        worker("other-d", Role.DECODE, scenario="chat", cluster="west", model="other"),
    ]
    view = fleet(*pair("chat", prefill_active=3), *other)
    kept, choice = restrict_to_group(view, query(scenario="chat"))
    assert {each.worker_id for each in kept.workers} == {"chat-east-p", "chat-east-d"}
    assert choice is not None


def test_how_busy_a_group_is_is_said_by_those_that_prefill() -> None:
    """Idle slots of decode workers would make the fuller group look empty."""
    busy = pair("chat", prefill_active=2)
    many = [worker(f"d{n}", Role.DECODE, scenario="chat", prefill_slots=4) for n in range(4)]
    idler = pair("chat", "west", prefill_active=1)
    assert "chat-west-p" in chosen(decide(fleet(*busy, *many, *idler), "chat"))


def test_without_an_offload_cluster_no_worker_is_added() -> None:
    view = fleet(*pair("chat"), worker("homeless", cluster=""), *pair(""))
    kept, _ = restrict_to_group(view, query(scenario="chat"))
    assert {each.worker_id for each in kept.workers} == {"chat-east-p", "chat-east-d"}


def test_a_request_with_a_checkpoint_asks_nobody_of_another() -> None:
    newer = dataclasses.replace(LAYOUT, model_fingerprint="newer")
    west = pair("", "west")
    upgraded = [
        dataclasses.replace(each, info=dataclasses.replace(each.info, layout=newer))
        for each in west
    ]
    view = fleet(*pair(""), *upgraded)
    for fingerprint, cluster in ((LAYOUT.model_fingerprint, "east"), ("newer", "west")):
        made = decide_route(
            POLICY, view, query(320, fingerprint=fingerprint), {}, NOW, OffloadState()
        )
        assert chosen(made) == {f"any-{cluster}-p", f"any-{cluster}-d"}
    gone = decide_route(POLICY, view, query(fingerprint="gone"), {}, NOW, OffloadState()).route
    assert isinstance(gone, Refusal)
    assert "none of checkpoint gone is left" in gone.message
    assert gone.reason is RefusalReason.NO_WORKERS
