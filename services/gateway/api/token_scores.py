"""Log-probabilities of tokens in OpenAI's format, and their assignment to parts of the text.

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
"""Replaces minus infinity, which JSON lacks; OpenAI's API uses the same value."""


def id_name(token_id: int) -> str:
    """A token's name made of its id, in vLLM's format. Unlike the token's text, it is unique."""
    return f"token_id:{token_id}"


def token_score(
    token_bytes: TokenBytes, token_id: int, logprob: float, *, as_id: bool = False
) -> dict[str, Any]:
    """One token with its log-probability.

    Args:
        as_id: name the token by its id; `bytes` are still those of its text.
    """
    raw = token_bytes(token_id)
    name = id_name(token_id) if as_id else raw.decode(errors="replace")
    return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(raw)}


def chosen_score(
    token_bytes: TokenBytes, token_id: int, entry: TokenLogprobs, *, as_ids: bool = False
) -> dict[str, Any]:
    """A chosen token, with the most likely tokens at its position.

    Args:
        as_ids: name tokens by their ids.
    """
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **token_score(token_bytes, token_id, entry.logprob, as_id=as_ids),
        "top_logprobs": [
            token_score(token_bytes, top_id, logprob, as_id=as_ids) for top_id, logprob in top
        ],
    }


class ScoresOfText:
    """Assigns tokens to the parts of a message's text.

    Not every token belongs to the text: the marks around thinking and calls do not. Text may also
    be held back, so a part can come later than its tokens.
    """

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []

    def add(self, scores: Sequence[dict[str, Any]]) -> None:
        """Adds generated tokens."""
        self._waiting += scores

    def take(self, text: str) -> list[dict[str, Any]]:
        """Takes the tokens of the next part of the text; earlier tokens are dropped.

        If the text is not found, as with a character of several tokens, it takes all held tokens.
        """
        waiting = self._waiting
        ends = list(accumulate(len(score["token"]) for score in waiting))
        joined = "".join(score["token"] for score in waiting)
        # A mark may contain the text's first word, so positions where tokens begin are tried first.
        begins = (begin for begin in (0, *ends) if joined.startswith(text, begin))
        at = next(begins, joined.find(text))
        self._waiting = []
        if at < 0:
            return waiting
        first = next(number for number, end in enumerate(ends) if end > at)
        last = next(number for number, end in enumerate(ends) if end >= at + len(text))
        self._waiting = waiting[last + 1 :]
        return waiting[first : last + 1]
