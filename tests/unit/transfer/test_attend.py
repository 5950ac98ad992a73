"""Arguments of ATTEND: what goes in comes out, and what does not fit is named."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.types import KvLayout, Refusal, RefusalReason
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.attend import AttendArguments, ClaimKind, decode_attend, most_queries
from kvmesh.transfer.frames import MAX_ARGUMENT_BYTES

LAYOUT = KvLayout("model", "bfloat16", 16, 4, 2, 64)
GOOD = AttendArguments(
    kind=ClaimKind.RESERVATION,
    claim=WriteClaim(11, 7, 1, b"secret"),
    first=3,
    count=5,
    layer=3,
    num_queries=9,
    num_heads=8,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)


def test_arguments_survive_the_wire() -> None:
    assert decode_attend(GOOD.encode(), 9 * 8 * 64 * 2, LAYOUT) == GOOD
    assert GOOD.answer_bytes == 9 * 8 * 64 * 2 + 9 * 8 * 4


def test_the_bytes_on_the_wire_stay_as_they_are() -> None:
    claim = struct.pack("<BQQIB", 1, 11, 7, 1, 6) + b"secret"
    shape = struct.pack("<IIHIHHBf", 3, 5, 3, 9, 8, 64, 3, 0.125)
    assert GOOD.encode() == claim + shape
    assert len(replace(GOOD, claim=WriteClaim(1, 1, 1, b"x" * 255)).encode()) < MAX_ARGUMENT_BYTES


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 32}, "head_dim"),
        ({"layer": 4}, "layer"),
        ({"num_heads": 0}, "heads"),
        ({"num_heads": 7}, "heads"),
        ({"num_queries": 0}, "queries"),
        ({"count": 0}, "count"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": float("inf")}, "scale"),
    ],
)
def test_what_does_not_fit_the_holder_is_named(changes: dict[str, Any], word: str) -> None:
    wrong = replace(GOOD, **changes)
    refusal = decode_attend(wrong.encode(), wrong.operand_bytes, LAYOUT)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.INVALID
    assert refusal.message.startswith(f"{word}:")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (b"", "arguments"),
        (GOOD.encode() + b"\0", "arguments"),
        (b"\x09" + GOOD.encode()[1:], "kind"),
        (GOOD.encode()[:-5] + b"\x09" + GOOD.encode()[-4:], "dtype"),
    ],
)
def test_a_form_that_is_wrong_is_named(arguments: bytes, word: str) -> None:
    refusal = decode_attend(arguments, GOOD.operand_bytes, LAYOUT)
    assert isinstance(refusal, Refusal)
    assert refusal.message.startswith(f"{word}:")


def test_an_operand_holds_whole_queries() -> None:
    assert most_queries(8, 64, "bfloat16") == (64 << 20) // 1024


@settings(max_examples=60)
@given(st.binary(max_size=64), st.integers(0, 1 << 32), st.integers(0, 60), st.integers(1, 255))
def test_damaged_arguments_are_refused_or_fit(
    noise: bytes, operand_bytes: int, at: int, flip: int
) -> None:
    damaged = bytearray(GOOD.encode())
    damaged[at % len(damaged)] ^= flip
    for arguments in (noise, bytes(damaged)):
        found = decode_attend(arguments, operand_bytes, LAYOUT)
        if isinstance(found, AttendArguments):
            assert found.operand_bytes == operand_bytes
            assert found.layer < LAYOUT.num_layers
