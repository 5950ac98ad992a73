"""Gives shared memory its pages when it is made, instead of at the first write to each.

The first write to a page takes the writer long: 22 ms for 32 MiB of KV in pages of 4 KiB, of which
the copy itself is 3 ms. And a host with too little memory says so at the start of a worker, not
under load. Tests: tests/unit/transfer/test_pages.py.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from kvmesh.core.advice import POPULATE_WRITE, madvise
from kvmesh.core.cores import usable_cores
from kvmesh.core.errors import ConfigError

_MOST_THREADS = 8
_PIECE_BYTES = 64 << 20
_MIB = 1 << 20


def populate(mapping: mmap.mmap) -> None:
    """Allocates all pages of a writable mapping, with several threads; takes up to 0.6 s per GiB.

    Kernels before 5.14 allocate them at the first write.

    Raises:
        ConfigError: the host has too little memory.
    """
    size = len(mapping)
    first = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(first)
    pieces = range(0, size, _PIECE_BYTES)
    with ThreadPoolExecutor(min(usable_cores(), len(pieces), _MOST_THREADS)) as threads:
        errors = threads.map(
            lambda at: madvise(address + at, min(_PIECE_BYTES, size - at), POPULATE_WRITE), pieces
        )
        failed = {each for each in errors if each not in (0, errno.EINVAL)}
    del first  # as long as it lives, the mapping cannot be closed
    if failed:
        text = ", ".join(os.strerror(each) for each in sorted(failed))
        raise ConfigError(
            f"the host has no {size // _MIB:,} MiB of memory for KV blocks ({text}): use fewer"
            " blocks, see --engine.num-blocks"
        )
