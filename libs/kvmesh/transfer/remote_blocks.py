"""Queries of attention over a holder's blocks: sends questions, receives partial answers.

Tests: tests/contract/test_queries.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.transfer.asker import Asker, Work
from kvmesh.transfer.attend import ATTEND, AttendArguments, most_queries
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.query_line import Question
from kvmesh.transfer.remote_attention import PartialAnswer

_LSE_BYTES = 4
_INFINITY = {
    "float32": ("<u4", 0x7F800000),
    "float16": ("<u2", 0x7C00),
    "bfloat16": ("<u2", 0x7F80),
}
"""Per dtype, its unsigned type and infinity as integer: without the sign, NaN is higher still."""


class PendingAnswer:
    """Attention that a holder computes (`PendingAttention`)."""

    def __init__(
        self, asker: Asker, holder: Holder, questions: Sequence[Question], work: Work
    ) -> None:
        """Wraps questions that were sent, in the order of the rows of their answers."""
        self._asker = asker
        self._holder = holder
        self._questions = questions
        self._work = work
        self._started = asker.now()

    def wait(self) -> PartialAnswer:
        """See `PendingAttention.wait`; an answer with NaN or infinity counts as a refusal."""
        try:
            self._asker.receive(self._holder, self._questions)
            self._check_numbers()
        except (LostError, RefusedError) as error:
            self._asker.note_failure(self._holder.peer, error)
            raise
        seconds = self._asker.now() - self._started
        self._asker.observe(self._holder.peer, self._questions, self._work, seconds)
        outputs, sums = zip(*(question.into for question in self._questions), strict=True)
        return PartialAnswer(_whole(outputs), _whole(sums))

    def _check_numbers(self) -> None:
        # NaN would spread to every later token without any error.
        layout = self._asker.layout
        for question in self._questions:
            output, sums = question.into
            if not (_are_finite(output, layout.dtype) and _are_finite(sums, "float32")):
                text = "the holder's answer holds NaN or infinity"
                raise RefusedError(Refusal(RefusalReason.INVALID, text))


def _are_finite(numbers: memoryview, dtype: str) -> bool:
    type_, infinity = _INFINITY[dtype]
    no_sign = np.iinfo(type_).max >> 1
    return bool((np.frombuffer(numbers, type_) & no_sign).max() < infinity)


def _whole(pieces: Sequence[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(bytearray().join(pieces))


class RemoteBlocks:
    """Blocks of one holder for attention from this worker (`RemoteAttention`)."""

    def __init__(self, asker: Asker, holder: Holder, blocks: range) -> None:
        """`blocks` are indexes of the blocks that the holder's claim names."""
        self._asker = asker
        self._holder = holder
        layout = asker.layout
        self._num_positions = len(blocks) * layout.block_size
        self._template = AttendArguments(
            kind=holder.kind,
            claim=holder.claim,
            first=blocks.start,
            count=len(blocks),
            layer=0,
            num_queries=0,
            num_heads=0,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            scale=1.0,
        )

    def ask(
        self, layer: int, queries: memoryview, shape: Sequence[int], scale: float
    ) -> PendingAnswer:
        """See `RemoteAttention.ask`."""
        num_queries, num_heads, head_dim = shape
        step = most_queries(num_heads, head_dim, self._template.dtype)
        queries = queries.cast("B")
        row_bytes = queries.nbytes // num_queries
        questions = []
        for first in range(0, num_queries, step):
            count = min(step, num_queries - first)
            arguments = dataclasses.replace(
                self._template, layer=layer, num_queries=count, num_heads=num_heads, scale=scale
            )
            operands = queries[first * row_bytes : (first + count) * row_bytes]
            into = [
                memoryview(bytearray(arguments.operand_bytes)),
                memoryview(bytearray(count * num_heads * _LSE_BYTES)),
            ]
            questions.append(Question(ATTEND, arguments.encode(), operands, into))
        work = Work(num_queries * self._num_positions, num_heads * head_dim)
        pending = PendingAnswer(self._asker, self._holder, questions, work)
        self._asker.send(self._holder, questions)
        return pending
