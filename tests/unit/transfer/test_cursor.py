"""Any views, taken in any batches, give all their bytes in order."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.transfer.cursor import ViewCursor


@given(
    st.lists(st.binary(max_size=20), max_size=30),
    st.lists(st.tuples(st.integers(1, 25), st.integers(1, 25)), min_size=1),
)
def test_batches_and_partial_advances(parts: list[bytes], steps: list[tuple[int, int]]) -> None:
    cursor = ViewCursor([memoryview(part) for part in parts])
    taken = b""
    turn = 0
    while not cursor.at_end:
        max_bytes, advance = steps[turn % len(steps)]
        turn += 1
        batch = b"".join(cursor.batch(max_bytes))
        assert 1 <= len(batch) <= max_bytes
        taken += batch[:advance]
        cursor.advance(min(advance, len(batch)))
    assert taken == b"".join(parts)
    assert cursor.batch(10) == []


def test_a_batch_has_a_bounded_number_of_buffers() -> None:
    data = memoryview(bytes(5000))
    cursor = ViewCursor([data[i : i + 1] for i in range(5000)])

    assert len(cursor.batch(1 << 20)) <= 1024


def test_taken_views_are_the_next_bytes() -> None:
    data = bytes(range(250)) * 8
    cursor = ViewCursor([memoryview(data)[i : i + 1] for i in range(1000)] + [memoryview(data)])
    assert b"".join(cursor.take(700)) == data[:700]
    assert b"".join(cursor.take(600)) == data[700:1000] + data[:300]
    assert b"".join(cursor.take(1700)) == data[300:]
    assert cursor.at_end
