from __future__ import annotations

import pytest

from kvmesh.core.types import RouteCause, WorkerId
from kvmesh.policy.forwarding import (
    FULL_PACE_WAITERS,
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    REROUTE_AFTER_S,
    ROUNDS_PER_ROUTE,
    PrefillPeer,
    backoff_s,
    offer_order,
    rounds_per_route,
    still_refusing,
)


def test_fewest_connections_first() -> None:
    peers = [PrefillPeer(WorkerId(n), c) for n, c in (("a", 3), ("b", 0), ("c", 1), ("d", 0))]
    assert offer_order(peers) == ["b", "d", "c", "a"]


def test_a_batch_that_is_being_filled_goes_on() -> None:
    peers = [PrefillPeer(WorkerId("a"), 3, is_filling=True), PrefillPeer(WorkerId("b"), 0)]
    assert offer_order(peers) == ["a", "b"]


def test_backoff_grows_to_its_limit() -> None:
    waits = [backoff_s(rounds, 1) for rounds in range(40)]
    assert waits[0] == MIN_BACKOFF_S
    assert waits == sorted(waits)
    assert waits[-1] == backoff_s(10**6, FULL_PACE_WAITERS) == MAX_BACKOFF_S


def test_many_waiting_requests_ask_at_a_bounded_rate() -> None:
    rates = [count / backoff_s(100, count) for count in (8, 80, 800)]
    assert max(rates) <= FULL_PACE_WAITERS / MAX_BACKOFF_S * 1.001


@pytest.mark.parametrize("cause", list(RouteCause))
def test_plans_that_name_only_who_is_free_are_tried_once(cause: RouteCause) -> None:
    once = cause in (RouteCause.SHORT_PROMPT, RouteCause.HELP)
    assert rounds_per_route(cause) == (1 if once else ROUNDS_PER_ROUTE)


def test_who_refused_just_now_is_to_be_avoided_yet() -> None:
    refused = {WorkerId("a"): 1.0, WorkerId("b"): 1.1}
    assert still_refusing(refused, 1.0 + REROUTE_AFTER_S) == {"b": 1.1}
    assert still_refusing(refused, 1.1 + REROUTE_AFTER_S) == {}
