"""Converts generated tokens to text that is safe to send: whole characters, no stop strings.

Pure: no I/O, no clock. Tests: tests/unit/gateway/text/test_detokenizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers.decoders import DecodeStream

from kvmesh.core.values import quick

PROMPT_TAIL_TOKENS = 8
"""Number of last prompt tokens read first, so that the first token keeps its leading space."""

MAX_HELD_TOKENS = 32
"""Maximum number of tokens kept while they form no whole character, which has four bytes at most.

Decoding a further token costs as much time as all kept ones.
"""

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4
_INVALID_PREFIX = "Invalid prefix encountered"


class WholeTokens(dict[int, str]):
    """Texts of a byte-level vocabulary's tokens that consist of whole characters.

    Such a token has the same text in every context. Other tokens, and tokens that were added to the
    vocabulary, are not in the map. Texts are computed on first use.

    Args:
        fast: a tokenizer whose decoder only converts characters to bytes.
        bytes_of: the byte that each character of a token represents.
    """

    def __init__(self, fast: tokenizers.Tokenizer, bytes_of: Mapping[str, int]) -> None:
        super().__init__()
        self._fast = fast
        self._bytes_of = bytes_of
        self._added = frozenset(fast.get_added_tokens_decoder())

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._text(token_id)
        return text

    def ends_whole(self, token_id: int) -> bool:
        """Whether the text ends with a whole character after this token."""
        return token_id in self._added or bool(self[token_id])

    def _text(self, token_id: int) -> str:
        token = self._fast.id_to_token(token_id) or ""
        if token_id in self._added or not all(char in self._bytes_of for char in token):
            return ""
        try:
            text = bytes(self._bytes_of[char] for char in token).decode()
        except UnicodeDecodeError:
            return ""
        return "" if text.endswith(_NO_CHARACTER) else text


class StopStrings:
    """Finds stop strings in text that arrives in pieces.

    Text that could be the start of a stop string is held back until more text decides it.

    Args:
        stops: the stop strings, none of them empty.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string"
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Adds text.

        Returns:
            Text that may be sent now, and the stop string if one is complete (the earliest one;
            text after it is dropped and nothing more may be pushed).
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None
        )
        if found is not None:
            at, stop = found
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Returns the held text at the end of generation: it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@quick
@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text of pushed tokens.

    Attributes:
        text: safe to send.
        num_used: number of tokens that belong to the output; tokens after a stop string do not.
        stop: the stop string that ended generation.
    """

    text: str
    num_used: int
    stop: str | None = None


class Detokenizer:
    """Incremental text of one generation.

    A character that is incomplete at the end of generation is dropped. Invalid bytes are dropped
    too, if there are many or if they would change earlier text.

    Args:
        fast: the model's tokenizer.
        prompt_ids: the prompt; only its end is used.
        stops: stop strings.
        include_stop: keep the stop string, or the text of the stop token, in the output.
        skip_special_tokens: leave out tokens such as end-of-turn marks.
        min_tokens: stop strings count only after this many tokens.
        whole: texts of tokens that need no decoder; ten times as fast.
    """

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        whole: WholeTokens | None = None,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._fast = fast
        self._skip_special = skip_special_tokens
        self._tail = prompt_ids[-PROMPT_TAIL_TOKENS:]
        self._whole = whole
        self._is_whole = whole is not None and (not self._tail or whole.ends_whole(self._tail[-1]))
        self._stream: DecodeStream | None = None
        self._last_with_text: int | None = None
        self._num_held = 0
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextPiece:
        """Adds tokens.

        Args:
            ends_with_stop_token: the last token ended generation; its text is not output unless
                stop strings are included.
        """
        stops = self._stops
        if stops is None:
            drops_last = ends_with_stop_token and not self._include_stop
            text = self.plain(token_ids[:-1] if drops_last else token_ids)
            return TextPiece(text, len(token_ids))
        parts: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            is_stop_token = ends_with_stop_token and index == len(token_ids) - 1
            if is_stop_token and not self._include_stop:
                break
            text = self._step(token_id)
            if self._num_tokens < self._min_tokens:
                parts.append(text)
                continue
            safe, stop = stops.push(text)
            parts.append(safe)
            if stop is not None:
                return TextPiece("".join(parts), index + 1, stop)
        return TextPiece("".join(parts), len(token_ids))

    def plain(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens that do not end generation. Only without stop strings."""
        assert self._stops is None, "text may have to be held back"
        if len(token_ids) == 1:  # the hot path
            return self._step(token_ids[0])
        return "".join(map(self._step, token_ids))

    def _stream_after(self, tail: list[int]) -> DecodeStream:
        """Returns a decode stream that has read the prompt's end.

        It includes an incomplete character there, unless a skipped special token follows: later
        tokens cannot complete the character then.
        """
        end = len(tail)
        while end and not self._text_of(tail[end - 1 : end]):
            end -= 1
        whole = end
        if end and self._is_half(tail[end - 1 : end]):
            while whole > max(0, end - _CHARACTER_BYTES) and self._is_half(tail[:whole]):
                whole -= 1
            if self._is_half(tail[:whole]):  # more bytes than a character has: use no context
                return DecodeStream([], self._skip_special)
        # With half a character in its context, the stream would return the whole context as text.
        stream = DecodeStream(tail[:whole], self._skip_special)
        if end == len(tail):
            for token_id in tail[whole:]:
                stream.step(self._fast, token_id)
        return stream

    def _stream_now(self) -> DecodeStream:
        """A decode stream in its state after the last token with text, or after the prompt."""
        last = self._last_with_text
        if last is None:
            return self._stream_after(list(self._tail))
        return DecodeStream([last], self._skip_special)

    def _text_of(self, token_ids: list[int]) -> str:
        text: str = self._fast.decode(token_ids, skip_special_tokens=self._skip_special)
        return text

    def _is_half(self, token_ids: list[int]) -> bool:
        return self._text_of(token_ids).endswith(_NO_CHARACTER)

    def _step(self, token_id: int) -> str:
        whole = self._whole
        if whole is not None and self._is_whole and (known := whole[token_id]):
            self._last_with_text, self._stream = token_id, None
            return known
        if self._stream is None:
            self._stream = self._stream_now()
        try:
            text = self._stream.step(self._fast, token_id)
        except Exception as error:  # the library raises bare exceptions for it
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            # With invalid bytes, the stream decodes its context differently from what it returned.
            # With the token itself as context, the token has its text in the middle of a sentence.
            self._stream = DecodeStream([token_id], self._skip_special)
            text = self._stream.step(self._fast, token_id)
        if text:
            self._last_with_text = token_id
            self._num_held = 0
            self._is_whole = True
            return text
        self._is_whole = False
        self._num_held += 1
        if self._num_held >= MAX_HELD_TOKENS:
            self._num_held = 0
            last = self._last_with_text
            self._stream = DecodeStream([] if last is None else [last], self._skip_special)
        return ""

    def finish(self) -> str:
        """Returns the rest of the text, if generation ended without a stop string."""
        return "" if self._stops is None else self._stops.flush()
