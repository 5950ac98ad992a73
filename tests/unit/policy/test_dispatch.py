from __future__ import annotations

from kvmesh.core.types import WorkerId
from kvmesh.policy.dispatch import BatchTraffic, dispatch, volume

W1, W2, W3 = (WorkerId(f"w{i}") for i in (1, 2, 3))


def test_the_papers_example() -> None:
    """TokenLake Figure 8: on worker 3, the target of its put, only a query travels."""
    batch = BatchTraffic(frozenset({W2}), {W3: 1})
    assert volume(batch, W3, 4096) == 4 * 4096
    assert volume(batch, W1, 4096) == 2 * 4 * 4096


def test_batches_do_not_share_a_worker() -> None:
    same = BatchTraffic(frozenset({W1}), {W1: 100})
    found = dispatch([same, same], [W1, W2, W3], 64)
    assert len(set(found.workers)) == 2
    assert W1 in found.workers
    assert found.volume_bytes == 4 * 64 * 101


def test_nothing_to_dispatch() -> None:
    assert dispatch([], [W1], 64).workers == ()
