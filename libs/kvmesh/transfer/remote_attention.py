"""Attention over KV that lies elsewhere, as a step of the engine sees it. Torch-free.

Tests: tests/integration/test_remote_prefix.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class PartialAnswer(NamedTuple):
    """Attention over the remote part.

    Attributes:
        output: [queries, heads, head_dim] in the dtype of the queries.
        lse: [queries, heads] fp32.
    """

    output: memoryview
    lse: memoryview


class PendingAttention(Protocol):
    """An answer that is not here yet."""

    def wait(self) -> PartialAnswer:
        """Blocks until the answer is there.

        Raises:
            RefusedError: the holder refused.
            LostError: the answer did not come.
        """
        ...


class RemoteAttention(Protocol):
    """Blocks of one holder that accept queries. Used by one thread, never the event loop's."""

    def ask(
        self, layer: int, queries: memoryview, shape: Sequence[int], scale: float
    ) -> PendingAttention:
        """Sends queries of one layer, which must stay unchanged until the answer is there.

        Args:
            layer: layer of the KV layout.
            queries: bytes of [queries, heads, head_dim], rotated.
            shape: shape of `queries`.
            scale: factor of the scores.

        Raises:
            LostError: the holder cannot be reached.
        """
        ...
