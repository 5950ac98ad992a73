"""ASCII text to token ids by tables of words and pieces: ten times as fast as the tokenizer itself.

A byte-level BPE vocabulary cuts text into words by a regular expression and merges within a word
alone, so the ids of a text are those of its words, one after the other. Words repeat; what the
tokenizer said about one is kept. The expressions are written for Unicode; for ASCII they mean the
same to Python's `re`, and all other text is left to the tokenizer. To each of them a word begins
wherever a space stands before something that is none, so text is cut there first, which is cheap,
and only a piece that is not known is cut into its words.
Pure. Tests: tests/unit/gateway/test_word_encoder.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import tokenizers

MAX_WORDS = 32_768
"""Words that are kept; then the table begins anew."""

MAX_PIECES = 32_768
"""Pieces that are kept; then their table begins anew."""

MAX_WORD_CHARS = 48
"""Longer words and pieces are rare, and many; they are not kept."""

MAX_NEW_WORDS = 8
"""Words of one text that are looked up one by one; with more, the whole text is faster."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT_2 = rf"{_CONTRACTIONS}| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|{_SPACES}"


def _later(digits: str, letter: str, number: str) -> str:
    """The expression of Llama 3 and Qwen, which differ in how many digits are a word."""
    return (
        rf"(?i:{_CONTRACTIONS})|[^\r\n{letter}{number}]?{_one(letter)}+|{_one(number)}{digits}"
        rf"| ?[^\s{letter}{number}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
    )


def _one(group: str) -> str:
    return group if group.startswith("\\") else f"[{group}]"


_KNOWN = {
    _later(digits, r"\p{L}", r"\p{N}"): _later(digits, "A-Za-z", "0-9") for digits in ("", "{1,3}")
}
"""Expressions of tokenizer files, and what they are for ASCII."""


_PIECES = re.compile(r"(?= \S)", re.ASCII)


class WordEncoder:
    """The tables of one tokenizer.

    Args:
        fast: says what a word's ids are.
        pattern: matches the words of ASCII text.
        added: tokens that are found in a text before it is cut into words, with their ids.
    """

    def __init__(self, fast: tokenizers.Tokenizer, pattern: str, added: Mapping[str, int]) -> None:
        self._fast = fast
        self._words_of = re.compile(pattern, re.ASCII).findall
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._added = {text: (token_id,) for text, token_id in added.items()}
        self._words: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, tuple[int, ...]] = {}

    @property
    def num_words(self) -> int:
        """Words that are known."""
        return len(self._words)

    @property
    def num_pieces(self) -> int:
        """Pieces that are known."""
        return len(self._pieces)

    def encode(self, text: str) -> tuple[int, ...] | None:
        """Token ids of a text, no special tokens added; None leaves it to the tokenizer."""
        if not text.isascii():
            return None
        pieces = self._cut_up(text)
        try:
            return tuple(chain.from_iterable(map(self._pieces.__getitem__, pieces)))
        except KeyError:
            return self._learn(pieces)

    def _cut_up(self, text: str) -> list[str]:
        """Pieces and added tokens; together they are the text."""
        if self._cut is None:
            return _PIECES.split(text)
        pieces: list[str] = []
        for number, part in enumerate(self._cut.split(text)):
            if number % 2:
                pieces.append(part)
            elif part:
                pieces += _PIECES.split(part)
        return pieces

    def _learn(self, pieces: list[str]) -> tuple[int, ...] | None:
        """Takes new pieces for their words; None if there are too many new ones of these."""
        found = {piece: self._pieces.get(piece) for piece in pieces}
        new = {
            piece: [piece] if piece in self._added else self._words_of(piece)
            for piece, ids in found.items()
            if ids is None
        }
        ids_of = self._look_up(dict.fromkeys(chain.from_iterable(new.values())))
        if ids_of is None:
            return None
        for piece, words in new.items():
            found[piece] = tuple(chain.from_iterable(map(ids_of.__getitem__, words)))
        if len(self._pieces) + len(new) > MAX_PIECES:
            self._pieces.clear()
        self._pieces.update(
            (piece, ids)
            for piece in new
            if (ids := found[piece]) is not None and len(piece) <= MAX_WORD_CHARS
        )
        return tuple(chain.from_iterable(ids for piece in pieces if (ids := found[piece])))

    def _look_up(self, words: Collection[str]) -> dict[str, tuple[int, ...]] | None:
        """The ids of words, after asking the tokenizer about new ones; None if that cannot be."""
        known = {word: ids for word in words if (ids := self._words.get(word)) is not None}
        new = [word for word in words if word not in known]
        if len(self._words) + len(new) > MAX_WORDS:
            self._words.clear()
            self._pieces.clear()
            return None
        asked = {word: self._ids_of(word) for word in new[:MAX_NEW_WORDS]}
        found = {word: ids for word, ids in asked.items() if ids is not None}
        self._words.update(
            (word, ids) for word, ids in found.items() if len(word) <= MAX_WORD_CHARS
        )
        return None if len(found) < len(new) else known | found

    def _ids_of(self, word: str) -> tuple[int, ...] | None:
        """A word's ids; None if it would not be one word on its own."""
        if word in self._added:
            return self._added[word]
        if self._words_of(word) != [word]:
            return None
        return tuple(self._fast.encode(word, add_special_tokens=False).ids)


def word_encoder(fast: tokenizers.Tokenizer) -> WordEncoder | None:
    """The table for a tokenizer; None for one whose words it cannot tell."""
    settings: dict[str, Any] = json.loads(fast.to_str())
    model = settings["model"]
    normalizer = settings.get("normalizer") or {"type": "NFC"}
    added = settings.get("added_tokens") or []
    pattern = _pattern(settings.get("pre_tokenizer") or {})
    is_plain = (
        model["type"] == "BPE"
        and not model.get("dropout")
        and normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD")  # no change to ASCII
        and not settings.get("truncation")
        and not settings.get("padding")
        and not any(
            token["single_word"] or token["lstrip"] or token["rstrip"] or token["normalized"]
            for token in added
        )
    )
    if pattern is None or not is_plain:
        return None
    return WordEncoder(fast, pattern, {token["content"]: token["id"] for token in added})


def _pattern(pre: Mapping[str, Any]) -> str | None:
    """What words are in ASCII text, by the tokenizer's settings; None if that is not known."""
    if pre.get("type") == "ByteLevel":
        return _GPT_2 if pre["use_regex"] and not pre["add_prefix_space"] else None
    match pre.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return _KNOWN.get(regex)
    return None
