from __future__ import annotations

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.types import BlockHash
from kvmesh.policy.heat import HeatTable

SIZE = 2


def block(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def prefix(path: str, num_segments: int | None = None) -> bytes:
    """Chained hashes of a path: each letter is a segment of SIZE blocks that names all before."""
    count = len(path) if num_segments is None else num_segments
    return b"".join(
        block(f"{path[: depth + 1]}/{number}") for depth in range(count) for number in range(SIZE)
    )


def name(path: str) -> BlockHash:
    return BlockHash(prefix(path)[-16:])


def reads(table: HeatTable, path: str) -> float:
    found = table.get(name(path))
    return 0.0 if found is None else found.reads


def test_a_read_counts_for_every_whole_segment() -> None:
    table = HeatTable(SIZE, 100)
    table.note(prefix("ab"))
    table.note(prefix("ac") + block("half a segment"))
    assert (reads(table, "a"), reads(table, "ab"), reads(table, "ac")) == (2, 1, 1)
    assert len(table) == 3


def test_the_prefix_of_a_segment_is_put_together_again() -> None:
    table = HeatTable(SIZE, 100)
    table.note(prefix("abc"))
    assert table.prefix(name("abc")) == prefix("abc")
    assert table.prefix(name("a")) == prefix("a")


def test_old_reads_weigh_less_and_are_forgotten() -> None:
    table = HeatTable(SIZE, 100)
    table.note(prefix("a"), 8)
    table.note(prefix("b"), 1)
    for _ in range(5):
        table.fade(0.5)
    assert reads(table, "a") == 0.25
    assert table.get(name("b")) is None


def test_a_full_table_keeps_the_hottest() -> None:
    table = HeatTable(SIZE, 8)
    for _ in range(3):
        table.note(prefix("hot"))
    for number in range(50):
        table.note(prefix(chr(200 + number)))
        assert len(table) <= 8
    assert [reads(table, path) for path in ("h", "ho", "hot")] == [3, 3, 3]


def test_tables_of_two_replicas_add_up() -> None:
    one, two, both = (HeatTable(SIZE, 100) for _ in range(3))
    one.note(prefix("ab"), 2)
    two.note(prefix("ac"), 3)
    for table in (one, two):
        both.merge(table.hottest(100))
    assert (reads(both, "a"), reads(both, "ab"), reads(both, "ac")) == (5, 2, 3)


def test_what_is_read_no_more_is_told_once() -> None:
    table = HeatTable(SIZE, 100)
    for _ in range(5):
        table.note(prefix("abc"))
    table.note(prefix("ax"), 40)
    told = []
    for _ in range(10):
        told += table.cooled(0.5, 1.0, 10)
        table.fade(0.5)
    first, second = told
    assert (first.prefix, first.own_blocks, first.name) == (prefix("abc"), 2 * SIZE, name("abc"))
    assert (second.prefix, second.own_blocks) == (prefix("ax"), 2 * SIZE)


def test_prefixes_that_cool_together_share_no_block() -> None:
    table = HeatTable(SIZE, 100)
    for path in ("abcd", "abxy", "ab"):
        table.note(prefix(path), 0.25)
    cooled = table.cooled(0.25, 1.0, 10)
    assert sorted(each.own_blocks for each in cooled) == [2 * SIZE, 4 * SIZE]
    assert {each.prefix for each in cooled} == {prefix("abcd"), prefix("abxy")}
    assert table.cooled(0.25, 1.0, 1) == cooled[:1]


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.text("ab", min_size=1, max_size=5), st.just("fade"), st.sampled_from(("xyz", "xy"))
        ),
        max_size=60,
    ),
    st.integers(4, 12),
)
def test_what_is_given_is_closed_under_parents_and_bounded(events: list[str], bound: int) -> None:
    table = HeatTable(SIZE, bound)
    for event in events:
        if event == "fade":
            table.fade(0.5)
        else:
            table.note(prefix(event))
        assert len(table) <= bound
        seen: dict[BlockHash, float] = {}
        for segment in table.hottest(bound):
            if segment.parent is not None:
                assert seen[segment.parent] >= segment.reads
            seen[segment.name] = segment.reads
            assert len(table.prefix(segment.name)) == (segment.depth + 1) * SIZE * 16


def test_the_hottest_come_most_read_first_and_each_after_its_parent() -> None:
    table = HeatTable(SIZE, 100)
    for path, count in (("a", 1), ("bc", 3), ("d", 2)):
        table.note(prefix(path), count)
    found = [segment.name for segment in table.hottest(3)]
    assert found == [name("b"), name("bc"), name("d")]
    assert [segment.name for segment in table.hottest(1)] == [name("b")]
    assert HeatTable(SIZE, 100).hottest(3) == []
