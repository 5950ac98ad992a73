from __future__ import annotations

from kvmesh.core.types import WorkerId
from kvmesh.policy.forwarding import ForwardReason, PrefillPeer, intervene, offer_order


def test_fewest_connections_first() -> None:
    peers = [PrefillPeer(WorkerId(n), c) for n, c in (("a", 3), ("b", 0), ("c", 1), ("d", 0))]
    assert offer_order(peers) == ["b", "d", "c", "a"]


def test_a_batch_that_is_being_filled_goes_on() -> None:
    peers = [PrefillPeer(WorkerId("a"), 3, is_filling=True), PrefillPeer(WorkerId("b"), 0)]
    assert offer_order(peers) == ["a", "b"]


def test_waiting_ends_at_the_limit() -> None:
    assert intervene(1.99, 2.0) is ForwardReason.OFFER
    assert intervene(2.0, 2.0) is ForwardReason.TIMED_OUT
