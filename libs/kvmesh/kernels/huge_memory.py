"""Huge pages for weights, which a core reads up to 1.7 times as fast as small pages.

Linux only, and only a hint: memory that cannot be collapsed stays as it is.
Tests: tests/unit/kernels/test_huge_memory.py.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

# Bytes of a huge page on x86 and most ARM systems.
PIECE_BYTES = 2 << 20
# MADV_COLLAPSE of linux/mman.h: collapse present pages now, whatever the system's THP setting.
_COLLAPSE = 25


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    advise: Callable[..., int] = function
    return advise


def gather(address: int, num_bytes: int) -> int:
    """Collapses written memory into huge pages; content and addresses stay.

    Huge pages that the range shares with its neighbours are collapsed, too. Memory smaller than a
    huge page is left alone.

    Args:
        address: address of anonymous memory of this process, in use until the call returns.

    Returns:
        Number of huge pages after the call.
    """
    advise = _madvise()
    if advise is None or num_bytes < PIECE_BYTES:
        return 0
    first = address // PIECE_BYTES * PIECE_BYTES
    # One by one, since a call that reaches beyond mapped memory is refused.
    pieces = range(first, address + num_bytes, PIECE_BYTES)
    return sum(advise(piece, PIECE_BYTES, _COLLAPSE) == 0 for piece in pieces)
