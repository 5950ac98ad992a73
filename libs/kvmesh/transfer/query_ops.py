"""What a worker implements to compute next to its KV for others. Torch-free.

Tests: tests/contract/test_queries.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvmesh.core.types import Refusal
from kvmesh.transfer.frames import QueryFrame


@dataclass(frozen=True, slots=True, eq=False)
class QueryGrant:
    """Leave to compute; each grant is its own.

    Attributes:
        query: the frame that it answers.
        answer_bytes: size of the answer.
        work: what `QueryOps.compute` wants to know of it.
    """

    query: QueryFrame
    answer_bytes: int
    work: Any


class QueryOps(Protocol):
    """Answers QUERY frames of the ops that it names.

    It alone knows claims and layouts, so it checks all arguments; the channel checks the size of
    the answer against the asker's room before it reads the operands.
    """

    @property
    def ops(self) -> frozenset[int]:
        """Numbers of the computations that are done here."""
        ...

    def begin(self, query: QueryFrame) -> QueryGrant | Refusal:
        """Checks the arguments and holds the KV; on the event loop, must not block it.

        The KV stays as it is until the grant's `end`.
        """
        ...

    def compute(self, grant: QueryGrant, operands: memoryview) -> Sequence[memoryview] | Refusal:
        """The answer, contiguous pieces that are sent in order.

        Called in another thread, one call after the other.
        """
        ...

    def end(self, grant: QueryGrant) -> None:
        """Called once for each grant, on the event loop; nobody reads its KV any more."""
        ...
