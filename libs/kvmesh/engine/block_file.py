"""Blocks in one preallocated file, with an index that survives the process.

    header      identity of the blocks; a file with another identity is started anew
    records     64 bytes per place: key, sum of the block, number of the write, sum of the record
    blocks      block_bytes per place

A record is cleared before its block is overwritten and written after it, so a process that dies in
between leaves an empty place. After a power loss the checksums reveal unwritten blocks. One process
at a time uses the file. Tests: tests/unit/engine/test_block_file.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import crc32c
import numpy as np
from numpy.typing import NDArray

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import BlockHash
from kvmesh.kv.tiers import Copy
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

_MAGIC = b"kvmesh tier 1\n"
_PAGE = 4096
_KEY_BYTES = 40
_MAX_VIEWS = 512  # per system call; IOV_MAX is 1024
_RECORD = np.dtype(
    [
        ("key", f"V{_KEY_BYTES}"),
        ("key_bytes", "<u4"),
        ("block_sum", "<u4"),
        ("number", "<u8"),
        ("unused", "<u4"),
        ("record_sum", "<u4"),
    ]
)


class BlockFile:
    """Places of a tier in a file.

    Args:
        path: path of the file; its folder is created.
        identity: identity of the blocks: checkpoint, shape, kinds of blocks.
        num_places: number of places, for which the file has room from the start.

    Raises:
        ConfigError: the file cannot be created, does not fit the disk, or belongs to a running
            worker.
    """

    def __init__(self, path: Path, identity: str, block_bytes: int, num_places: int) -> None:
        self._path = path
        self._block_bytes = block_bytes
        self._first = _PAGE + -(-num_places * _RECORD.itemsize // _PAGE) * _PAGE
        self._records: NDArray[np.void] = np.zeros(num_places, _RECORD)
        digest = hashlib.sha256(f"{identity} {block_bytes} {num_places}".encode()).digest()
        try:
            self._fd = self._open(path)
        except OSError as error:
            raise ConfigError(
                f"tiers.disk_path: {path}: {error.strerror}; name another folder"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(self._fd, _PAGE, 0)[: len(_MAGIC) + 32] == _MAGIC + digest:
                self._read_records()
            else:
                self._begin(_MAGIC + digest, num_places)
        except BlockingIOError as error:
            os.close(self._fd)
            raise ConfigError(
                f"tiers.disk_path: {path} is a running worker's: give each its own --worker.id"
            ) from error
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"tiers.disk_gib: {path}: {error.strerror}; ask for less, or name another disk"
            ) from error
        self._number = int(self._records["number"].max(initial=0))

    @staticmethod
    def _open(path: Path) -> int:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)

    def _begin(self, header: bytes, num_places: int) -> None:
        os.ftruncate(self._fd, 0)
        os.posix_fallocate(self._fd, 0, self._first + num_places * self._block_bytes)
        os.pwrite(self._fd, header, 0)

    def _read_records(self) -> None:
        num_bytes = self._records.nbytes
        records = np.frombuffer(os.pread(self._fd, num_bytes, _PAGE), _RECORD)
        if len(records) == len(self._records):
            self._records = records.copy()
        self._records["number"][self._damaged()] = 0

    def _damaged(self) -> list[int]:
        written = np.flatnonzero(self._records["number"]).tolist()
        records = ((place, self._records[place]) for place in written)
        return [place for place, each in records if _sum_of(each) != int(each["record_sum"])]

    def kept(self) -> list[Copy]:
        """Returns the intact copies, oldest first; of two copies of a block only the newer one."""
        places = np.flatnonzero(self._records["number"])
        found: dict[BlockHash, int] = {}
        for place in places[np.argsort(self._records["number"][places])]:
            record = self._records[place]
            key = BlockHash(record["key"].tobytes()[: int(record["key_bytes"])])
            found.pop(key, None)
            found[key] = int(place)
        return [Copy(key, place) for key, place in found.items()]

    def write(self, copies: Sequence[Copy], blocks: Sequence[memoryview]) -> list[bool]:
        """Writes blocks into places; in any thread, one call at a time.

        Returns:
            Per copy, whether it was written.
        """
        records = np.zeros(len(copies), _RECORD)
        for record, copy, block in zip(records, copies, blocks, strict=True):
            self._number += 1
            record["key"] = np.void(copy.key.ljust(_KEY_BYTES, b"\0"))
            record["key_bytes"], record["number"] = len(copy.key), self._number
            record["block_sum"] = crc32c.crc32c(block)
            record["record_sum"] = _sum_of(record)
        places = np.array([copy.place for copy in copies], np.int64)
        order = np.argsort(places)  # consecutive places are one call
        places = places[order]
        try:
            self._write_records(places, np.zeros(len(copies), _RECORD))
            self._write_blocks(places.tolist(), [blocks[index] for index in order])
            self._write_records(places, records[order])
        except OSError as error:
            log.warning("tier_not_written", path=str(self._path), error=error.strerror)
            return [False] * len(copies)
        return [True] * len(copies)

    def _write_records(self, places: NDArray[np.int64], records: NDArray[np.void]) -> None:
        self._records[places] = records
        for first, count in _runs(places.tolist()):
            place = int(places[first])
            there = self._records[place : place + count].tobytes()
            _all_of(os.pwrite(self._fd, there, _PAGE + place * _RECORD.itemsize), len(there))

    def _write_blocks(self, places: Sequence[int], blocks: Sequence[memoryview]) -> None:
        for first, count in _runs(places):
            at = self._first + places[first] * self._block_bytes
            _all_of(
                os.pwritev(self._fd, blocks[first : first + count], at), count * self._block_bytes
            )

    def read(self, places: Sequence[int], blocks: Sequence[memoryview]) -> list[bool]:
        """Reads places; in any thread, concurrent with reads and writes of other places.

        Returns:
            Per place, whether the block is intact.
        """
        good: list[bool] = []
        for first, count in _runs(places):
            into = blocks[first : first + count]
            at = self._first + places[first] * self._block_bytes
            try:
                num_read = os.preadv(self._fd, into, at)
            except OSError as error:
                log.warning("tier_not_read", path=str(self._path), error=error.strerror)
                num_read = 0
            num_whole = num_read // self._block_bytes
            sums = self._records["block_sum"][list(places[first : first + count])].tolist()
            same = [
                crc32c.crc32c(block) == wanted
                for block, wanted in zip(into[:num_whole], sums[:num_whole], strict=True)
            ]
            self._clear(
                place
                for place, is_same in zip(places[first : first + count], same, strict=False)
                if not is_same
            )
            good += same + [False] * (count - num_whole)
        return good

    def _clear(self, damaged: Iterable[int]) -> None:
        """Clears records of damaged blocks, so that the next process does not announce them."""
        for place in damaged:
            with contextlib.suppress(OSError):
                self._write_records(np.array([place]), np.zeros(1, _RECORD))

    def close(self) -> None:
        """Closes the file; no read or write may be under way. May be called again."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def _sum_of(record: np.void) -> int:
    return crc32c.crc32c(record.tobytes()[: _RECORD.itemsize - 4])


def _all_of(num_written: int, num_bytes: int) -> None:
    if num_written != num_bytes:
        raise OSError(0, f"{num_written} of {num_bytes} bytes were written")


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (index, count) of consecutive places, at most as many as one call takes."""
    runs: list[tuple[int, int]] = []
    for index, place in enumerate(places):
        first, count = runs[-1] if runs else (0, 0)
        if runs and place == places[first] + count and count < _MAX_VIEWS:
            runs[-1] = (first, count + 1)
        else:
            runs.append((index, 1))
    return runs
