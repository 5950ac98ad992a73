"""`madvise` of Linux without the interpreter's lock, which Python's own one holds.

Tests: tests/unit/kernels/test_huge_memory.py, tests/unit/transfer/test_pages.py.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import sys
from collections.abc import Callable

POPULATE_WRITE = 23
"""Allocates all pages now; since Linux 5.14."""

COLLAPSE = 25
"""Collapses present pages to huge ones now, whatever the system's setting; since Linux 6.1."""


@functools.cache
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    advise: Callable[..., int] = function
    return advise


def madvise(address: int, num_bytes: int, advice: int) -> int:
    """Returns the error number; 0 without an error, EINVAL for an advice that is not known here."""
    if sys.platform != "linux":
        return errno.EINVAL
    return 0 if _madvise()(address, num_bytes, advice) == 0 else ctypes.get_errno()
