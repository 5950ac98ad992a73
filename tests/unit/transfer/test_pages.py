"""Memory that has its pages before it is used."""

import mmap
import os
from collections.abc import Iterator

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.transfer import pages
from kvmesh.transfer.memory import create_shared

MIB = 1 << 20


@pytest.fixture
def empty() -> Iterator[tuple[int, mmap.mmap]]:
    """Shared memory of several pieces, without pages."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 5 * MIB + mmap.PAGESIZE)
    yield fd, mmap.mmap(fd, 5 * MIB + mmap.PAGESIZE)
    os.close(fd)


def num_present(fd: int) -> int:
    """Bytes of a memfd that have pages."""
    return os.fstat(fd).st_blocks * 512


def test_all_pages_of_all_pieces_are_there_afterwards(
    empty: tuple[int, mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, mapping = empty
    monkeypatch.setattr(pages, "_PIECE_BYTES", 2 * MIB)
    assert num_present(fd) == 0

    pages.populate(mapping)

    assert num_present(fd) == 5 * MIB + mmap.PAGESIZE
    assert mapping[:] == bytes(5 * MIB + mmap.PAGESIZE)
    mapping.close()


def test_a_new_pool_has_its_pages() -> None:
    fd, mapping = create_shared("test", 3 * MIB)
    assert num_present(fd) == 3 * MIB
    mapping.close()
    os.close(fd)


def test_a_host_without_the_memory_says_how_much_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(pages, "POPULATE_WRITE", 9999)  # the kernel knows no such advice
    os.close(create_shared("old kernel", MIB)[0])
    monkeypatch.setattr(pages, "madvise", lambda _address, _size, _advice: 12)

    with pytest.raises(ConfigError, match=r"no 3 MiB of memory.*Cannot allocate.*num-blocks"):
        create_shared("test", 3 * MIB)

    assert set(os.listdir("/proc/self/fd")) == fds
