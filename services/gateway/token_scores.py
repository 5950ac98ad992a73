"""Log-probabilities of tokens as OpenAI's API writes them, and which of them a text is made of.

Pure. Tests: tests/unit/gateway/test_token_scores.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from kvmesh.core.types import TokenLogprobs

TokenBytes = Callable[[int], bytes]
"""The bytes that one token stands for."""

LOWEST = -9999.0
"""JSON has no infinity; OpenAI's API writes this for a token that cannot come."""


def token_score(token_bytes: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    """One token and how likely it was."""
    raw = token_bytes(token_id)
    text = raw.decode(errors="replace")
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def chosen_score(token_bytes: TokenBytes, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
    """A chosen token and the most likely ones at its place."""
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **token_score(token_bytes, token_id, entry.logprob),
        "top_logprobs": [token_score(token_bytes, top_id, logprob) for top_id, logprob in top],
    }


class ScoresOfText:
    """Tells which tokens the parts of a text are made of, where some say nothing to the reader.

    Marks around thinking and calls are tokens too, and text may wait for what follows it.
    """

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []

    def add(self, scores: Sequence[dict[str, Any]]) -> None:
        """More tokens were generated."""
        self._waiting += scores

    def take(self, text: str) -> list[dict[str, Any]]:
        """The tokens of the next part of the text; those before them belong to none.

        Where a character is made of several tokens and no text can be found, all that wait are it.
        """
        waiting = self._waiting
        ends = list(accumulate(len(score["token"]) for score in waiting))
        joined = "".join(score["token"] for score in waiting)
        # A mark may hold the word that the text begins with: a token's begin is looked at first.
        begins = (begin for begin in (0, *ends) if joined.startswith(text, begin))
        at = next(begins, joined.find(text))
        self._waiting = []
        if at < 0:
            return waiting
        first = next(number for number, end in enumerate(ends) if end > at)
        last = next(number for number, end in enumerate(ends) if end >= at + len(text))
        self._waiting = waiting[last + 1 :]
        return waiting[first : last + 1]
