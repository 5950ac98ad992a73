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
    """An answer on its way."""

    def wait(self) -> PartialAnswer:
        """Blocks until it is there.

        Raises:
            RefusedError: the holder said no.
            LostError: it did not come.
        """
        ...


class RemoteAttention(Protocol):
    """Blocks of one holder that can be asked. Used by one thread, never the event loop's."""

    def ask(
        self, layer: int, queries: memoryview, shape: Sequence[int], scale: float
    ) -> PendingAttention:
        """Sends queries of one layer; they stay as they are until the answer was waited for.

        Args:
            layer: of the KV layout.
            queries: bytes of [queries, heads, head_dim], rotated.
            shape: of `queries`.
            scale: factor of the scores.

        Raises:
            LostError: the holder cannot be reached.
        """
        ...
