"""Log-probabilities of tokens as OpenAI's API writes them, and which of them a text is made of.

Pure. Tests: tests/unit/gateway/api/test_token_scores.py.
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


def id_name(token_id: int) -> str:
    """A token's name by its id, as vLLM writes it: unlike texts, no two are the same."""
    return f"token_id:{token_id}"


def token_score(
    token_bytes: TokenBytes, token_id: int, logprob: float, *, as_id: bool = False
) -> dict[str, Any]:
    """One token and how likely it was.

    Args:
        as_id: it is named by its id; `bytes` are those of its text all the same.
    """
    raw = token_bytes(token_id)
    name = id_name(token_id) if as_id else raw.decode(errors="replace")
    return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def chosen_score(
    token_bytes: TokenBytes, token_id: int, entry: TokenLogprobs, *, as_ids: bool = False
) -> dict[str, Any]:
    """A chosen token and the most likely ones at its place.

    Args:
        as_ids: tokens are named by their ids.
    """
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **token_score(token_bytes, token_id, entry.logprob, as_id=as_ids),
        "top_logprobs": [
            token_score(token_bytes, top_id, logprob, as_id=as_ids) for top_id, logprob in top
        ],
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
