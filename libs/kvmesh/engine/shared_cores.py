"""Cores of a machine that several engines share: one that computes alone uses all of them.

While an engine has work, it holds a lock on one byte of a file that all of them have open. The
kernel releases the lock when the process ends, however it ends.

Tests: tests/unit/engine/test_shared_cores.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from kvmesh.core.errors import ConfigError

_LOCK = struct.Struct("@hhqqi0q")
"""`struct flock` of 64-bit Linux (fcntl(2)): type, from where, start, length, process."""

_PLACES = 1 << 62
"""Bytes of which each engine has one at random; the file stays empty."""


class SharedCores:
    """One engine among those that share a machine.

    Args:
        path: file of all of them; made if it does not exist.
        cores: number of cores of the machine.
        use: sets the number of threads of what the calling thread computes.

    Raises:
        ConfigError: the file cannot be locked.
    """

    def __init__(self, path: Path, cores: int, use: Callable[[int], None]) -> None:
        self._cores = cores
        self._use = use
        self._num_threads = 0
        self._has_work = False
        self._place = secrets.randbelow(_PLACES)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._num_others()
        except OSError as error:
            raise ConfigError(f"engine.cores_file: {path}: {error.strerror}") from error

    @property
    def name(self) -> str:
        """Name of the cores, the same for all engines that share them and for no others."""
        file = os.fstat(self._file)
        place = f"{socket.gethostname()} {file.st_dev} {file.st_ino}"
        return hashlib.sha256(place.encode()).hexdigest()[:16]

    def begin_step(self) -> None:
        """Has work from now on, and divides the cores; call it in the computing thread."""
        if not self._has_work:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
            self._has_work = True
        self.divide()

    def divide(self) -> None:
        """Divides the cores among the engines that have work; call it in the computing thread."""
        num_threads = max(1, self._cores // (1 + self._num_others()))
        if num_threads != self._num_threads:
            self._use(num_threads)
            self._num_threads = num_threads

    def rest(self) -> None:
        """Leaves the cores to the others: there is no work."""
        if self._has_work:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)
            self._has_work = False

    def close(self) -> None:
        """Closes the file; the cores are the others'."""
        os.close(self._file)

    def _num_others(self) -> int:
        """Returns the number of other engines with work; each holds one lock."""
        count, ranges = 0, [(0, _PLACES)]
        while ranges:
            first, end = ranges.pop()
            asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, end - first, 0)
            kind, _, place, _, _ = _LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
            if kind != fcntl.F_UNLCK:  # any of those in the range
                count += 1
                ranges += [each for each in ((first, place), (place + 1, end)) if each[0] < each[1]]
        return count
