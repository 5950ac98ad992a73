import random

import pytest

from kvmesh.kv.block_parts import Part, PartialBlocks

SIZE = 12


@pytest.mark.parametrize("seed", range(20))
def test_against_a_byte_map(seed: int) -> None:
    rng = random.Random(seed)
    partial, whole, written = PartialBlocks(), False, [False] * SIZE
    for _ in range(60):
        offset = rng.randrange(SIZE)
        part = Part(offset, rng.randrange(1, SIZE - offset + 1))
        partial.begin(0, part, was_whole=whole, block_bytes=SIZE)
        whole = False
        written[part.offset : part.end] = [False] * part.size
        if rng.random() < 0.8:  # else the write failed
            whole = partial.add(0, part, SIZE)
            written[part.offset : part.end] = [True] * part.size
        assert whole == all(written)
        assert len(partial) == (any(written) and not whole)


def test_blocks_are_apart() -> None:
    partial = PartialBlocks()
    assert not partial.add(0, Part(0, 6), SIZE)
    assert not partial.add(1, Part(6, 6), SIZE)
    assert partial.add(0, Part(6, 6), SIZE)
    partial.forget([1, 2])
    assert len(partial) == 0


@pytest.mark.parametrize(
    ("other", "expected"),
    [((0, 4), False), ((0, 5), True), ((7, 1), True), ((8, 9), False), ((5, 1), True)],
)
def test_overlap(other: tuple[int, int], expected: bool) -> None:
    assert Part(4, 4).overlaps(Part(*other)) is expected
    assert Part(*other).overlaps(Part(4, 4)) is expected
