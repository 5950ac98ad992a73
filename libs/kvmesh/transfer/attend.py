"""ATTEND: attention of some queries over KV that another worker holds. Pure: arguments and sizes.

A QUERY with this op carries rotated queries, `[queries, heads, head_dim]` in the pool's dtype. The
answer is `[queries, heads, head_dim]` in the same dtype, normalised over the named blocks, then
`[queries, heads]` fp32, the log of each sum of exponentials.

The output has the dtype of the computation instead of fp32: an average of values is rounded by at
most half a unit in its last place, like any result of attention, and an answer in bf16 is half as
long. The weights that merge parts come from the sums, which need fp32: bf16's 8 bits make a sum of
20 wrong by 6 percent.
Source: TokenLake 4.2. Tests: tests/unit/transfer/test_attend.py, tests/contract/test_queries.py.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass

from kvmesh.core.types import KvLayout, Refusal, RefusalReason
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.frames import MAX_OPERAND_BYTES

ATTEND = 1
"""Number of the op on the wire."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_DTYPES = tuple(ITEM_BYTES)
_LSE_BYTES = 4
_CLAIM = struct.Struct("<BQQIB")
_SHAPE = struct.Struct("<IIHIHHBf")


class ClaimKind(enum.IntEnum):
    """Type of a claim; the values are numbers on the wire."""

    RESERVATION = 1
    """A reservation at the holder, whose cached blocks are read by their indexes."""
    LEASE = 2
    """A lease on blocks of the holder."""


@dataclass(frozen=True, slots=True)
class AttendArguments:
    """Arguments of one ATTEND query.

    Attributes:
        kind, claim: the right to read the blocks.
        first, count: blocks, as indexes of the claim's blocks; all their positions are visible.
        layer: layer of the KV layout.
        num_queries, num_heads, head_dim: shape of the operand.
        dtype: dtype of the operand, a name of `ITEM_BYTES`.
        scale: factor of the scores.
    """

    kind: ClaimKind
    claim: WriteClaim
    first: int
    count: int
    layer: int
    num_queries: int
    num_heads: int
    head_dim: int
    dtype: str
    scale: float

    @property
    def operand_bytes(self) -> int:
        """Bytes of the queries, and of the output."""
        return self.num_queries * self.num_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def answer_bytes(self) -> int:
        """Bytes of the output and the sums."""
        return self.operand_bytes + self.num_queries * self.num_heads * _LSE_BYTES

    def encode(self) -> bytes:
        """Encodes the arguments for the QUERY frame."""
        claim = self.claim
        head = _CLAIM.pack(
            self.kind,
            claim.reservation_id,
            claim.incarnation,
            claim.generation,
            len(claim.capability),
        )
        shape = _SHAPE.pack(
            self.first,
            self.count,
            self.layer,
            self.num_queries,
            self.num_heads,
            self.head_dim,
            _DTYPES.index(self.dtype) + 1,
            self.scale,
        )
        return head + claim.capability + shape


def most_queries(num_heads: int, head_dim: int, dtype: str) -> int:
    """Returns the maximum number of queries in one operand."""
    return MAX_OPERAND_BYTES // (num_heads * head_dim * ITEM_BYTES[dtype])


def decode_attend(
    arguments: bytes, operand_bytes: int, layout: KvLayout
) -> AttendArguments | Refusal:
    """Decodes arguments and checks them against operand and layout; a refusal names the fault."""
    fields = _fields(arguments)
    if isinstance(fields, str):
        return Refusal(RefusalReason.INVALID, fields)
    wrong = _difference(fields, operand_bytes, layout)
    return fields if wrong is None else Refusal(RefusalReason.INVALID, wrong)


def _fields(arguments: bytes) -> AttendArguments | str:
    """Decodes the arguments, or returns what is wrong with their form."""
    if len(arguments) < _CLAIM.size:
        return f"arguments: {len(arguments)} bytes hold no claim"
    kind, reservation_id, incarnation, generation, size = _CLAIM.unpack_from(arguments)
    expected = _CLAIM.size + size + _SHAPE.size
    if len(arguments) != expected:
        return f"arguments: {len(arguments)} bytes, must be {expected}"
    if kind not in ClaimKind.__members__.values():
        return f"kind: no claim has number {kind}"
    capability = arguments[_CLAIM.size : _CLAIM.size + size]
    numbers = _SHAPE.unpack_from(arguments, _CLAIM.size + size)
    first, count, layer, num_queries, num_heads, head_dim, dtype, scale = numbers
    if not 1 <= dtype <= len(_DTYPES):
        return f"dtype: none has number {dtype}"
    return AttendArguments(
        kind=ClaimKind(kind),
        claim=WriteClaim(reservation_id, incarnation, generation, capability),
        first=first,
        count=count,
        layer=layer,
        num_queries=num_queries,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=_DTYPES[dtype - 1],
        scale=scale,
    )


def _difference(fields: AttendArguments, operand_bytes: int, layout: KvLayout) -> str | None:
    """Returns the first argument that does not fit, with the reason; None if all fit."""
    heads, kv_heads = fields.num_heads, layout.num_kv_heads
    faults = (
        (fields.dtype != layout.dtype, f"dtype: {fields.dtype}, the blocks have {layout.dtype}"),
        (
            fields.head_dim != layout.head_dim,
            f"head_dim: {fields.head_dim}, the blocks have {layout.head_dim}",
        ),
        (fields.layer >= layout.num_layers, f"layer: {fields.layer} of {layout.num_layers}"),
        (heads == 0 or heads % kv_heads > 0, f"heads: {heads} for {kv_heads} KV heads"),
        (fields.num_queries == 0, "queries: none"),
        (fields.count == 0, "count: no blocks"),
        (not math.isfinite(fields.scale), f"scale: {fields.scale}"),
        (
            fields.operand_bytes != operand_bytes,
            f"operand: {operand_bytes} bytes, the shape has {fields.operand_bytes}",
        ),
    )
    return next((text for is_wrong, text in faults if is_wrong), None)
