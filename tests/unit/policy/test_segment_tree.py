from __future__ import annotations

from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.heavy_hitters import heavy_hitters, num_heavy_hitters
from kvmesh.policy.pool_eviction import plan_eviction
from kvmesh.policy.segment_tree import SegmentTree

A, B = WorkerId("a"), WorkerId("b")


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def tree(**paths: float) -> SegmentTree:
    """One chain per argument, a segment per letter, read so often; its copies are on worker a."""
    made = SegmentTree()
    for path, reads in paths.items():
        parent = None
        for depth in range(1, len(path) + 1):
            parent = made.add(name(path[:depth]), parent, A, now=float(len(made)))
            parent.accesses += reads
    return made


def listed(found: list[BlockHash]) -> list[str]:
    return [each.decode() for each in found]


class TestTree:
    def test_match_ends_at_the_first_gap(self) -> None:
        made = tree(xyz=1)
        found = made.match([name("x"), name("xy"), name("q"), name("xyz")])
        assert [s.name for s in found] == [name("x"), name("xy")]

    def test_a_segment_leaves_with_its_last_copy(self) -> None:
        made = tree(x=1)
        segment = made.get(name("x"))
        assert segment is not None
        made.add(name("x"), None, B, now=9.0)
        made.drop(segment, A)
        assert made.get(name("x")) is segment
        made.drop(segment, B)
        assert len(made) == 0
        assert not made.roots

    def test_a_dead_worker_takes_what_depends_on_it(self) -> None:
        made = tree(xyz=1, xq=1)
        root, child = made.get(name("x")), made.get(name("xy"))
        assert root is not None
        assert child is not None
        made.add(name("x"), None, B, now=9.0)
        made.add(name("xyz"), child, B, now=9.0)
        assert made.lose(A) == 3, "xy and xq are gone, and xyz cannot be read without xy"
        assert [s.name for s in made] == [name("x")]
        assert list(root.copies) == [B]
        assert not root.children

    def test_reads_fade(self) -> None:
        made = tree(x=8)
        made.fade(0.5)
        assert [s.accesses for s in made] == [4]


class TestHeavyHitters:
    def test_most_read_first_over_all_levels(self) -> None:
        made = tree(abc=5, abd=3, xyz=4)
        assert listed([s.name for s in heavy_hitters(made, 5)]) == ["a", "ab", "abc", "x", "xy"]

    def test_equal_to_a_sort_of_everything(self) -> None:
        made = tree(abcd=7, abe=5, f=6, fgh=2, ijk=1)
        found = [s.accesses for s in heavy_hitters(made, 6)]
        assert found == sorted((s.accesses for s in made), reverse=True)[:6]

    def test_their_number_grows_as_n_log_n(self) -> None:
        assert [num_heavy_hitters(n) for n in (1, 2, 8, 1000)] == [1, 2, 24, 9966]


class TestEviction:
    def test_oldest_leaf_first_then_its_parent(self) -> None:
        made = tree(ab=1, xy=1)
        assert listed(plan_eviction(made, A, 3)) == ["ab", "a", "xy"]

    def test_a_prefix_outlives_what_needs_it(self) -> None:
        made = tree(abc=1)
        made.add(name("abc"), made.get(name("ab")), B, now=9.0)
        segment = made.get(name("abc"))
        assert segment is not None
        made.drop(segment, A)
        assert plan_eviction(made, A, 5) == [], "worker b holds a child"

    def test_a_second_copy_may_go_before_its_children(self) -> None:
        made = tree(ab=1)
        made.add(name("a"), None, B, now=9.0)
        assert listed(plan_eviction(made, A, 1)) == ["a"]

    def test_pinned_segments_stay(self) -> None:
        made = tree(ab=1, x=1)
        assert listed(plan_eviction(made, A, 5, pinned={name("ab")})) == ["x"]
        assert listed(plan_eviction(made, A, 5, pinned={name("a")})) == ["ab", "x"]
