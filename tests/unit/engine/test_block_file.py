"""Blocks on disk: what was written is read, also by the next process, and nothing else ever is."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import BlockHash
from kvmesh.engine.block_file import BlockFile
from kvmesh.kv.tiers import Copy

BLOCK_BYTES = 5000
NUM_PLACES = 40


def content(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big") + (b"s\x01\x00" if number % 3 else b""))


def opened(folder: Path, identity: str = "model") -> BlockFile:
    return BlockFile(folder / "w.kv", identity, BLOCK_BYTES, NUM_PLACES)


def write(file: BlockFile, numbers: dict[int, int]) -> list[bool]:
    """Blocks by their places."""
    copies = [Copy(key(number), place) for place, number in numbers.items()]
    return file.write(copies, [memoryview(content(number)) for number in numbers.values()])


def read(file: BlockFile, copies: list[Copy]) -> dict[BlockHash, bytes]:
    """What is whole of copies."""
    blocks = [bytearray(BLOCK_BYTES) for _ in copies]
    good = file.read([copy.place for copy in copies], [memoryview(block) for block in blocks])
    return {c.key: bytes(b) for c, b, ok in zip(copies, blocks, good, strict=True) if ok}


def test_the_next_process_finds_what_was_written_in_order(tmp_path: Path) -> None:
    file = opened(tmp_path)
    assert file.kept() == []
    assert all(write(file, {5: 1, 6: 2, 7: 3, 20: 4, 0: 5}))
    assert all(write(file, {6: 6, 30: 1}))  # over another one, and a second copy
    file.close()
    again = opened(tmp_path)
    kept = again.kept()
    assert [(each.key, each.place) for each in kept] == [
        (key(3), 7),
        (key(4), 20),
        (key(5), 0),
        (key(6), 6),
        (key(1), 30),
    ]
    assert read(again, kept) == {key(number): content(number) for number in (1, 3, 4, 5, 6)}
    assert (tmp_path / "w.kv").stat().st_mode & 0o777 == 0o600
    again.close()


def test_another_model_reads_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path)
    write(file, {0: 1})
    file.close()
    other = opened(tmp_path, "another model")
    assert other.kept() == []
    other.close()
    assert opened(tmp_path).kept() == []


def test_a_file_has_one_worker(tmp_path: Path) -> None:
    file = opened(tmp_path)
    with pytest.raises(ConfigError, match="give each its own"):
        opened(tmp_path)
    file.close()
    opened(tmp_path).close()


def test_a_damaged_block_or_record_is_lost_and_nothing_else(tmp_path: Path) -> None:
    file = opened(tmp_path)
    write(file, {place: place + 1 for place in range(10)})
    kept = file.kept()
    fd = os.open(tmp_path / "w.kv", os.O_RDWR)
    os.pwrite(fd, b"?", file._first + 3 * BLOCK_BYTES + 77)
    assert read(file, kept).keys() == {key(place + 1) for place in range(10) if place != 3}
    os.pwrite(fd, b"?", 4096 + 5 * 64 + 3)
    os.close(fd)
    file.close()
    again = opened(tmp_path)
    # What was read as damaged is not announced again, nor what has a damaged record.
    whole = {key(place + 1) for place in range(10)} - {key(4), key(6)}
    assert {each.key for each in again.kept()} == whole
    again.close()
    os.truncate(tmp_path / "w.kv", again._first + 2 * BLOCK_BYTES)
    short = opened(tmp_path)
    assert read(short, short.kept()).keys() == {key(1), key(2)}
    short.close()


def test_a_folder_or_a_disk_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another folder"):
        opened(tmp_path / "file")
    with pytest.raises(ConfigError, match="ask for less"):
        BlockFile(tmp_path / "large.kv", "model", 1 << 40, 1 << 20)


def test_a_write_that_fails_loses_the_blocks_and_says_so(tmp_path: Path) -> None:
    file = opened(tmp_path)
    os.truncate(tmp_path / "w.kv", 8192)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        assert write(file, {0: 1, 1: 2}) == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()


_CHILD = """
import sys
from pathlib import Path
from tests.unit.engine.test_block_file import opened, write
file = opened(Path(sys.argv[1]))
print("open", flush=True)
number = 0
while True:
    number += 1
    write(file, {(number * 7 + step) % 40: number * 5 + step for step in range(5)})
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_that_is_killed_leaves_whole_blocks_only(tmp_path: Path, attempt: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ
    )
    assert child.stdout is not None
    child.stdout.readline()
    path = tmp_path / "w.kv"
    # Once around, and on to somewhere in the middle.
    while not any(os.pread(fd := os.open(path, os.O_RDONLY), 64, 4096 + 39 * 64)):
        os.close(fd)
    child.kill()
    child.wait()
    child.stdout.close()
    file = opened(tmp_path)
    kept = file.kept()
    found = read(file, kept)
    assert len(found) == len(kept) >= NUM_PLACES // 2
    for each, block in found.items():
        assert block == content(int.from_bytes(each[:16], "big"))
    file.close()
