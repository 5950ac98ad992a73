"""What one search remembers of refusals."""

from __future__ import annotations

import pytest

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import (
    Candidate,
    Endpoint,
    Placement,
    Refusal,
    RefusalReason,
    RouteCause,
    RoutePlan,
    WorkerId,
)
from kvmesh.policy.forwarding import REROUTE_AFTER_S
from services.gateway.errors import Stage
from services.gateway.request.refusals import Refusals

A, B, D = WorkerId("a"), WorkerId("b"), WorkerId("d")
BUSY = Refusal(RefusalReason.BUSY, "all slots are taken", retry_after_ms=50)
LATE = Refusal(RefusalReason.DEADLINE, "no time is left")
LONG = Refusal(RefusalReason.TOO_LONG, "9000 tokens; at most 4096")
ODD = Refusal(RefusalReason.INVALID, "no such token")


def plan(*prefill: WorkerId, decode: tuple[WorkerId, ...] = (D,)) -> RoutePlan:
    def named(names: tuple[WorkerId, ...]) -> tuple[Candidate, ...]:
        return tuple(Candidate(name, 1, Endpoint("127.0.0.1", 1)) for name in names)

    return RoutePlan(
        Placement.DISAGGREGATED,
        named(prefill),
        named(decode),
        cache_known=True,
        reason="",
        policy="kvmesh",
        cause=RouteCause.LOAD,
    )


def test_who_refused_is_avoided_until_a_plan_is_made_long_after() -> None:
    refusals = Refusals()
    refusals.note(Stage.PREFILL, BUSY, A, 1.0)
    refusals.note(Stage.SCHEDULER, BUSY, None, 1.0)
    refusals.fade(1.0 + REROUTE_AFTER_S / 2)
    refusals.note(Stage.DECODE, BUSY, B, 1.0 + REROUTE_AFTER_S / 2)
    assert set(refusals.workers) == {A, B}
    refusals.fade(1.0 + REROUTE_AFTER_S)
    assert set(refusals.workers) == {B}


def test_the_client_is_told_the_last_word_and_what_the_time_was_spent_on() -> None:
    refusals = Refusals()
    assert refusals.after(0.25).label == "gateway-deadline"
    refusals.note(Stage.PREFILL, BUSY, A, 1.0)
    refusals.note(Stage.DECODE, LATE, B, 2.0)
    told = refusals.after(0.25)
    assert told.label == "prefill-busy"
    assert told.refusal.message == (
        "no worker took the request within 250 ms; last answer: all slots are taken"
    )
    assert told.refusal.retry_after_ms == 50
    assert set(refusals.workers) == {A, B}


@pytest.mark.parametrize(
    ("refusal", "code"), [(LONG, "context_length_exceeded"), (ODD, "invalid_value")]
)
def test_a_plan_whose_one_side_refused_for_ever_ends_the_search(
    refusal: Refusal, code: str
) -> None:
    refusals = Refusals()
    refusals.note(Stage.PREFILL, BUSY, B, 0.0)
    refusals.note(Stage.PREFILL, refusal, A, 0.0)
    refusals.fade(9.0)
    refusals.check(plan(A, B))
    refusals.check(plan(B, decode=()))
    with pytest.raises(InvalidRequestError, match=refusal.message) as error:
        refusals.check(plan(A))
    assert error.value.code == code
