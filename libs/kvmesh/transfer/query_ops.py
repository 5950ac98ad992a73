"""Interface of a worker that computes next to its KV for other workers. Torch-free.

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
    """Permission to compute; grants are compared by identity.

    Attributes:
        query: the frame that it answers.
        answer_bytes: size of the answer.
        work: data that `begin` passes to `compute`.
    """

    query: QueryFrame
    answer_bytes: int
    work: Any


class QueryOps(Protocol):
    """Answers QUERY frames of its ops.

    Only it knows claims and layouts, so it checks all arguments. The channel checks the size of the
    answer against the asker's room before it reads the operands.
    """

    @property
    def ops(self) -> frozenset[int]:
        """Numbers of the computations that this worker offers."""
        ...

    def begin(self, query: QueryFrame) -> QueryGrant | Refusal:
        """Checks the arguments and holds the KV; on the event loop, must not block it.

        The KV stays unchanged until the grant's `end`.
        """
        ...

    def compute(self, grant: QueryGrant, operands: memoryview) -> Sequence[memoryview] | Refusal:
        """Computes the answer: contiguous pieces that are sent in order.

        Runs in another thread, one call after the other.
        """
        ...

    def end(self, grant: QueryGrant) -> None:
        """Ends a grant, on the event loop; called once for each. Its KV is no longer read."""
        ...
