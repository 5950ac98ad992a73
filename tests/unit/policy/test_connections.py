from __future__ import annotations

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.composition import COMPOSITIONS
from kvmesh.policy.connections import BY_CONNECTIONS, Connections

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def test_offers_go_to_the_batch_being_filled_then_by_connections() -> None:
    gateway = Connections()
    assert gateway.order([B, A, C]) == [A, B, C]
    gateway.accepted(B)
    assert gateway.order([A, B, C]) == [B, A, C], "it accepted the last one"
    gateway.rejected(B)
    assert gateway.order([A, B, C]) == [A, C, B]
    gateway.ended(B)
    assert gateway.num_open == 0


def test_without_batches_to_fill_the_fewest_connections_come_first() -> None:
    gateway = Connections(fills=False)
    gateway.accepted(B)
    assert gateway.order([A, B, C]) == [A, C, B]
    gateway.accepted(A)
    gateway.accepted(C)
    gateway.ended(C)
    assert gateway.order([A, B, C])[0] == C


def test_who_is_busy_does_not_end_the_batch_of_another() -> None:
    gateway = Connections()
    gateway.accepted(B)
    gateway.rejected(A)
    assert gateway.order([A, B, C])[0] == B


def test_each_request_is_counted_until_it_ends() -> None:
    gateway = Connections()
    gateway.accepted(A)
    gateway.accepted(A)
    gateway.accepted(B)
    gateway.rejected(B)
    gateway.ended(A)
    assert gateway.num_open == 2
    assert gateway.order([A, B, C]) == [C, A, B]
    gateway.accepted(A)
    gateway.rejected(A)
    assert gateway.order([A, B, C]) == [C, B, A]


def test_what_is_not_open_cannot_end() -> None:
    gateway = Connections()
    gateway.accepted(A)
    with pytest.raises(AssertionError, match="nothing is open at b"):
        gateway.ended(B)


def test_plans_say_who_orders_offers() -> None:
    """A gateway sees the name of the route policy in the plan."""
    names = {name for name, each in COMPOSITIONS.items() if each.route.name in BY_CONNECTIONS}
    assert names == {"pdserve"}
