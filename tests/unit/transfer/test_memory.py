"""Pools that can be mapped, and what is refused."""

import os
import random
import tempfile
from collections.abc import Iterator

import pytest

from kvmesh.transfer.host import host_id
from kvmesh.transfer.memory import (
    MappedPool,
    MappingError,
    copy_ranges,
    copy_views,
    create_shared,
)

BLOCK = 4096


@pytest.fixture
def shared() -> Iterator[tuple[int, memoryview]]:
    fd, mapping = create_shared("test", 8 * BLOCK)
    mapping[:] = random.Random(1).randbytes(8 * BLOCK)
    yield fd, memoryview(mapping)
    os.close(fd)


def test_a_mapped_pool_shows_the_owners_bytes(shared: tuple[int, memoryview]) -> None:
    fd, owner = shared
    pool = MappedPool(fd, 8, BLOCK)
    target = memoryview(bytearray(3 * BLOCK))

    copy_ranges([target], pool.byte_ranges([(5, 2), (0, 1)]))

    assert target == owner[5 * BLOCK : 7 * BLOCK].tobytes() + owner[:BLOCK].tobytes()
    with pytest.raises(AssertionError, match="outside"):
        pool.byte_ranges([(0, 1), (7, 2)])
    pool.close()
    pool.close()


def test_a_sealed_pool_cannot_be_cut_short_by_its_owner(shared: tuple[int, memoryview]) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(shared[0], BLOCK)


def test_a_pool_that_is_smaller_than_said_is_refused(shared: tuple[int, memoryview]) -> None:
    with pytest.raises(MappingError, match="32768 bytes for 9 blocks"):
        MappedPool(shared[0], 9, BLOCK)


def test_memory_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BLOCK)
    with pytest.raises(MappingError, match="seals 0x0"):
        MappedPool(fd, 1, BLOCK)
    os.close(fd)


def test_a_plain_file_is_refused() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(BLOCK)
        with pytest.raises(MappingError):
            MappedPool(file.fileno(), 1, BLOCK)


def test_copies_whose_cuts_differ_on_both_sides() -> None:
    rng = random.Random(3)
    source = memoryview(rng.randbytes(1000))
    target = memoryview(bytearray(1000))

    def cut(view: memoryview) -> list[memoryview]:
        borders = sorted(rng.sample(range(1, 1000), 20))
        pairs = zip([0, *borders], [*borders, 1000], strict=True)
        return [view[start:end] for start, end in pairs]

    copy_views(cut(target), cut(source))

    assert target == source


def test_this_host_has_an_identity() -> None:
    assert host_id() == host_id() != ""
