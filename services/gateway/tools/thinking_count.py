"""Counts the tokens of a generation that are thinking.

Pure. Tests: tests/unit/gateway/tools/test_thinking_count.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.tools.reasoning import Thinking


class ThinkingCount:
    """Counts the tokens of the thinking, including its marks.

    The count depends only on the tokens, not on their split into pieces.

    Args:
        thinking: the state in which the generation begins.
        token_bytes: returns the bytes of one token.
    """

    def __init__(self, thinking: Thinking, token_bytes: Callable[[int], bytes]) -> None:
        start, end = thinking.family.marks
        self._start = start.encode()
        self._end = end.encode()
        self._is_open = thinking.is_open
        self._token_bytes = token_bytes
        self._in_thinking = False
        self._is_over = False
        self._held = b""
        self._num_seen = 0
        self._count = 0

    def of(self, token_ids: Sequence[int]) -> int:
        """The count for a generation that extends the one of the last call."""
        while self._num_seen < len(token_ids) and not self._is_over:
            self._step(self._token_bytes(token_ids[self._num_seen]))
            self._num_seen += 1
            if self._in_thinking or self._is_open:
                self._count = self._num_seen
        return self._count

    def _step(self, raw: bytes) -> None:
        self._held += raw
        if not self._in_thinking:
            self._open()
        if self._in_thinking:
            self._is_over = self._end in self._held
            self._held = self._held[-(len(self._end) - 1) :]

    def _open(self) -> None:
        held = self._held.lstrip()
        if not held or (len(held) < len(self._start) and self._start.startswith(held)):
            return
        if held.startswith(self._start):
            self._held = held.removeprefix(self._start)
            self._in_thinking = True
        else:
            self._in_thinking, self._is_over = self._is_open, not self._is_open
