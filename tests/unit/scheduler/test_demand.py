from __future__ import annotations

import pytest

from kvmesh.core.types import RequestId, WorkerId
from kvmesh.policy.waiting import Demand, Looking
from services.scheduler.demand import STALE_S, DemandBoard
from tests.unit.policy.fleet_examples import query


def test_last_word_of_every_gateway_counts_for_its_model() -> None:
    board = DemandBoard()
    board.note_query("g1", query(waiting=9, waiting_reserved=9), 0.0)
    board.note_query("g1", query(waiting=5, waiting_reserved=2), 0.1)
    board.note_query("g2", query(waiting=1, waiting_reserved=1), 0.1)
    board.note_query("g3", query(waiting=7, model="other"), 0.1)
    demand = board.current("m", 0.2)
    assert (demand.reserved, demand.unreserved) == (3, 3)
    board.forget("g2")
    assert board.current("m", 0.2).reserved == 2


def test_what_waits_is_known_by_scenario() -> None:
    board = DemandBoard()
    board.note_query("g1", query(scenario="chat", waiting=5, waiting_reserved=2), 0.0)
    board.note_query("g1", query(scenario="doc", waiting=9, waiting_reserved=9), 0.0)
    board.note_query("g2", query(scenario="chat", waiting=1), 0.0)
    board.note_query("g2", query(scenario="other"), 0.0)
    demand = board.current("m", 0.1)
    assert demand.scenarios == {"chat": Looking(2, 4), "doc": Looking(9, 0)}
    assert (demand.reserved, demand.unreserved) == (11, 4)
    board.prune({"m"}, STALE_S)
    assert not board._told, "clients name scenarios as they like"


def test_what_was_told_long_ago_is_over() -> None:
    board = DemandBoard()
    board.note_query("g", query(waiting=5), 0.0)
    assert board.current("m", STALE_S) == Demand()


def test_who_asks_again_is_no_new_request() -> None:
    board = DemandBoard()
    for name in "abc":
        assert board.note_query("g", query(request_id=RequestId(name)), 0.0)
    assert board.take_new("m") == 3
    assert board.take_new("m") == 0
    assert not board.note_query("g", query(request_id=RequestId("a")), 0.3)
    assert board.take_new("m") == 0


def test_gateways_tell_for_which_cluster_requests_wait() -> None:
    board = DemandBoard()
    board.note_query("g1", query(waiting=20, waiting_reserved=12, waiting_remote=4), 0.0)
    board.note_query("g2", query(waiting=5, waiting_reserved=5, waiting_remote=5), 0.0)
    demand = board.current("m", 0.1)
    assert (demand.remote, demand.local, demand.unreserved) == (9, 8, 8)


def test_no_part_of_what_a_gateway_tells_is_more_than_the_whole() -> None:
    board = DemandBoard()
    board.note_query("g", query(waiting=2, waiting_reserved=5, waiting_remote=9), 0.0)
    board.note_query("h", query(waiting=7, waiting_reserved=3, waiting_remote=4), 0.0)
    demand = board.current("m", 0.1)
    assert (demand.remote, demand.local, demand.unreserved) == (5, 0, 4)


def test_a_worker_that_does_not_answer_the_gateway_says_nothing_of_the_request() -> None:
    board, silent = DemandBoard(), frozenset({WorkerId("w")})
    assert board.note_query("g", query(avoid=silent, unanswered=silent), 0.0)
    assert board.take_new("m") == 1


@pytest.mark.parametrize("lost", [frozenset(), frozenset({WorkerId("w")})])
def test_who_has_workers_to_avoid_was_counted_before(lost: frozenset[WorkerId]) -> None:
    board = DemandBoard()
    assert not board.note_query("g", query(avoid=frozenset({WorkerId("w")}), lost=lost), 0.0)
    assert board.take_new("m") == 0  # another scheduler counted it


def test_who_asks_again_late_is_no_new_request() -> None:
    board = DemandBoard()
    assert board.note_query("g", query(), 0.0)
    board.prune({"m"}, STALE_S)
    assert not board.note_query("g", query(avoid=frozenset({WorkerId("w")})), STALE_S)
    assert board.take_new("m") == 1


def test_what_nobody_serves_is_forgotten() -> None:
    board = DemandBoard()
    for number in range(3):
        board.note_query("g", query(request_id=RequestId(f"r{number}")), 0.0)
    board.note_query("g", query(request_id=RequestId("late"), model="other"), 0.5)
    board.prune({"other"}, STALE_S)
    assert list(board._asked) == ["late"]
    assert board.take_new("m") == 0, "a model that comes back does not begin with a peak"
    assert board.take_new("other") == 1
