"""Sums of payloads against their published check values."""

import pytest

from kvmesh.transfer.checksums import agree_checksum, checksum_function
from kvmesh.transfer.frames import Checksum

CHECK = memoryview(b"123456789")


@pytest.mark.parametrize(
    ("kind", "value"), [(Checksum.CRC32, 0xCBF43926), (Checksum.CRC32C, 0xE3069283)]
)
def test_the_check_value_in_one_piece_and_in_two(kind: Checksum, value: int) -> None:
    checksum = checksum_function(kind)

    assert checksum(CHECK, 0) == value
    assert checksum(CHECK[4:], checksum(CHECK[:4], 0)) == value


def test_agreement_does_not_depend_on_the_side() -> None:
    for ours in Checksum:
        for theirs in Checksum:
            assert agree_checksum(ours, theirs) is agree_checksum(theirs, ours)
