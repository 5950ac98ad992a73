"""The default's order: whose first token comes soonest, who is asked, when decode workers help."""

from __future__ import annotations

import dataclasses
import random

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import Placement, Role, RouteCause, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.ranking import BUSY_TOKENS, KVMESH, SLACK_TOKENS
from kvmesh.policy.routing import plan_route
from kvmesh.policy.view import WorkerView
from tests.unit.policy.fleet_examples import NOW, fleet, query, worker

LONG = 4000
NO_FETCH = FetchPace(token_s=0.001, inside_token_s=0.01)
"""KV travels so slowly that all is computed where it is not held."""


def pending(name: str, tokens: int, role: Role = Role.PREFILL, active: int = 1) -> WorkerView:
    view = worker(name, role, prefill_active=active)
    return dataclasses.replace(view, pending_tokens=tokens)


def plan(
    *workers: WorkerView, asked: RouteQuery | None = None, held: dict[str, int] | None = None
) -> RoutePlan:
    matches = {WorkerId(name): blocks for name, blocks in (held or {}).items()}
    asked = asked or query(LONG)
    view = dataclasses.replace(fleet(*workers), pace=NO_FETCH)
    made = plan_route(view, asked, matches, NOW, random.Random(0), KVMESH)
    assert isinstance(made, RoutePlan), made
    return made


def prefill(made: RoutePlan) -> list[str]:
    return [each.worker_id for each in made.prefill]


DECODE = worker("d", Role.DECODE, decode_running=7)
"""Too full to help."""


def test_what_waits_counts_as_much_as_what_is_left() -> None:
    holder, idle = pending("a", 1000), pending("b", 0)
    # 100 blocks of 16 tokens are more than the thousand tokens before it, 50 are less.
    assert prefill(plan(holder, idle, DECODE, held={"a": 100}))[0] == "a"
    assert prefill(plan(holder, idle, DECODE, held={"a": 50}))[0] == "b"


def test_prompts_on_their_way_count_as_long_as_this_one() -> None:
    seen = pending("a", LONG - 1)
    sent = dataclasses.replace(pending("b", 0), prefill_in_flight=1)
    assert prefill(plan(seen, sent, DECODE))[0] == "a"


def test_much_later_workers_are_not_asked() -> None:
    near, far = pending("b", SLACK_TOKENS), pending("c", SLACK_TOKENS + 1)
    assert prefill(plan(pending("a", 0), near, far, DECODE)) == ["a", "b"]


def test_a_full_holder_is_waited_for_until_it_refused() -> None:
    holder = pending("a", 0, active=4)
    # All of the prompt is there; the other one would compute more than a slot's wait is worth.
    others = pending("b", BUSY_TOKENS + SLACK_TOKENS - LONG + 2)
    held = {"a": LONG // 16}
    assert prefill(plan(holder, others, DECODE, held=held)) == ["a"]
    again = plan(holder, others, DECODE, asked=query(LONG, avoid=["a"]), held=held)
    assert prefill(again)[0] == "b"


def test_decode_workers_help_while_they_are_sooner() -> None:
    helper = worker("d", Role.DECODE, decode_running=3)
    busy = plan(pending("a", 8000), helper)
    assert (busy.placement, busy.cause) == (Placement.AGGREGATED, RouteCause.HELP)
    assert (prefill(busy), busy.decode) == (["d"], ())
    idle = plan(pending("a", 1000), helper)
    assert (idle.placement, prefill(idle)) == (Placement.DISAGGREGATED, ["a"])


def test_who_refused_is_no_measure_while_others_are_left() -> None:
    helper, late = worker("d", Role.DECODE, decode_running=3), pending("b", 8000)
    asked = query(LONG, avoid=["a"])
    again = plan(pending("a", 0), late, helper, asked=asked)
    assert (prefill(again), again.cause) == (["d"], RouteCause.HELP)
    alone = plan(pending("a", 0), helper, asked=asked)
    assert (alone.placement, prefill(alone)) == (Placement.DISAGGREGATED, ["a"])


def test_help_is_given_where_it_spares_more_misses_than_it_makes() -> None:
    """A prompt of 4 s, for which a tenth of a limit is missed, has its first token 8.2 s sooner."""
    room = PaceRoom(StepPace(0.01), 5000, strictest_s=0.03, spare_s=4.0)
    helper = worker("d", Role.DECODE, decode_running=3, room=room)
    for budget_s, placement in (
        (10, Placement.AGGREGATED),
        (81, Placement.AGGREGATED),
        (83, Placement.DISAGGREGATED),
        (0, Placement.AGGREGATED),  # nobody knows
    ):
        asked = query(LONG, ttft_budget_ms=1000 * budget_s)
        assert plan(pending("a", 8000), helper, asked=asked).placement is placement, budget_s


def test_a_decode_worker_helps_only_with_room_and_in_favour() -> None:
    late = pending("a", 8000)
    assert plan(late, DECODE).placement is Placement.DISAGGREGATED
    computing = worker("d", Role.DECODE, prefill_active=4)
    assert plan(late, computing).placement is Placement.DISAGGREGATED
    refused = plan(late, worker("d", Role.DECODE), asked=query(LONG, avoid=["d"]))
    assert refused.placement is Placement.DISAGGREGATED
    silent = worker("d", Role.DECODE, reported_at=NOW - 10)
    assert plan(late, silent).placement is Placement.DISAGGREGATED


def test_a_prompt_goes_to_the_worker_that_computes_on_shared_cores() -> None:
    """An idle prefill worker beside it would have half of them, and so both would."""
    helper = worker("d", Role.DECODE, decode_running=1, shared_cores="m")
    idle = worker("p", shared_cores="m")
    made = plan(idle, helper, asked=query(512))
    assert (made.placement, made.cause, prefill(made)) == (
        Placement.AGGREGATED,
        RouteCause.HELP,
        ["d"],
    )
    # Also when KV is on its way there. Cores of their own, or nobody who computes: as usual.
    coming = worker("d", Role.DECODE, decode_reserved=1, shared_cores="m")
    assert plan(idle, coming, asked=query(512)).placement is Placement.AGGREGATED
    for others in (
        (worker("p"), worker("d", Role.DECODE, decode_running=1)),
        (worker("p", shared_cores="m"), worker("d", Role.DECODE, decode_running=1)),
        (idle, worker("d", Role.DECODE, decode_running=1, shared_cores="n")),
        (idle, worker("d", Role.DECODE, shared_cores="m")),
    ):
        assert plan(*others, asked=query(512)).placement is Placement.DISAGGREGATED


def test_a_limit_keeps_prompts_from_those_who_decode_on_shared_cores() -> None:
    room = PaceRoom(StepPace(0.01), 5000, strictest_s=0.03, spare_s=0.1)
    decoding = worker("d", Role.DECODE, decode_running=1, shared_cores="m", room=room)
    made = plan(worker("p", shared_cores="m"), decoding, asked=query(512))
    assert made.placement is Placement.DISAGGREGATED


def test_two_prompts_on_shared_cores_wait_for_each_other() -> None:
    """Beside a prompt that the prefill worker computes, the decode worker would be no sooner."""
    busy, beside = worker("p", prefill_active=4, shared_cores="m"), worker("d", Role.DECODE)
    helped = plan(busy, beside, asked=query(512))
    assert helped.placement is Placement.AGGREGATED
    beside = worker("d", Role.DECODE, decode_reserved=1, shared_cores="m")
    made = plan(busy, beside, asked=query(512))
    assert (made.placement, prefill(made)) == (Placement.DISAGGREGATED, ["p"])


def test_of_mixed_workers_on_shared_cores_the_one_that_computes_goes_on() -> None:
    computing = worker("b", Role.HYBRID, decode_running=1, shared_cores="m")
    made = plan(worker("a", Role.HYBRID, shared_cores="m"), computing, asked=query(512))
    assert prefill(made)[0] == "b"
