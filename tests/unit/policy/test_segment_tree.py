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
    def plan(
        self, made: SegmentTree, count: int, pinned: frozenset[str] = frozenset()
    ) -> list[tuple[str, WorkerId]]:
        names = {name(each) for each in pinned}
        drops = plan_eviction(made, A, count, names)
        for drop in drops:
            segment = made.get(drop.segment)
            assert segment is not None
            made.drop(segment, drop.holder)  # asserts that nothing is left without its prefix
        return [(drop.segment.decode(), drop.holder) for drop in drops]

    def test_the_oldest_with_all_that_needs_it(self) -> None:
        assert self.plan(tree(ab=1, xy=1), 1) == [("ab", A), ("a", A)]

    def test_of_one_read_the_deepest_goes_first(self) -> None:
        made = tree(abc=1, x=1)
        for segment in made:
            made.read(segment, A, now=50.0)
        assert self.plan(made, 2) == [("abc", A), ("ab", A)]

    def test_what_needs_it_goes_from_other_workers_too(self) -> None:
        made = tree(a=1)
        made.add(name("ab"), made.get(name("a")), B, now=0.0)
        assert self.plan(made, 1) == [("ab", B), ("a", A)]

    def test_a_second_copy_goes_alone(self) -> None:
        made = tree(ab=1)
        made.add(name("a"), None, B, now=9.0)
        assert self.plan(made, 1) == [("a", A)]
        assert len(made) == 2

    def test_pinned_segments_and_their_prefixes_stay(self) -> None:
        assert self.plan(tree(ab=1, x=1), 5, frozenset({"ab"})) == [("x", A)]
        assert self.plan(tree(ab=1, x=1), 5, frozenset({"a"})) == [("ab", A), ("x", A)]

    def test_nothing_to_drop(self) -> None:
        assert self.plan(SegmentTree(), 3) == []
