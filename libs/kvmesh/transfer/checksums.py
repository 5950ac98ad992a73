"""Checksums of payloads. Tests: tests/unit/transfer/test_checksums.py."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import crc32c

from kvmesh.transfer.decoder import Sum
from kvmesh.transfer.frames import Checksum


def _crc32c(data: memoryview, value: int) -> int:
    # The processor has an instruction for this polynomial: about six times the speed of crc32.
    return crc32c.crc32c(data, value)


def checksum_function(kind: Checksum) -> Sum:
    """The running sum of a kind; crc32's for NONE, whose frames carry no sum."""
    return _crc32c if kind is Checksum.CRC32C else zlib.crc32


def is_crc32c(sum_: Sum) -> bool:
    """Whether a function of `checksum_function` sums as `NativeIo` does."""
    return sum_ is _crc32c


def sum_of(views: Iterable[memoryview], sum_: Sum, value: int) -> int:
    """The running sum of several views."""
    for view in views:
        value = sum_(view, value)
    return value


def agree_checksum(sender: Checksum, receiver: Checksum) -> Checksum:
    """What a connection uses: a sum if either end wants one, and the older kind if they differ."""
    wanted = [kind for kind in (sender, receiver) if kind is not Checksum.NONE]
    return min(wanted, default=Checksum.NONE)
