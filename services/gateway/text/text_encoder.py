"""Encodes texts as token ids, with fastokens if it agrees with `tokenizers`.

fastokens takes a tenth of the time, often a fiftieth, but does not support every tokenizer
(docs/adr/0023-two-tokenizers.md). `tokenizers` is the reference: models were trained with it.
Tests: tests/unit/gateway/text/test_text_encoder.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fastokens
import tokenizers

from services.gateway.text.encoder_check import first_difference

THREAD_CHARS = 4096
"""Number of characters from which `tokenizers` encodes in a thread.

Longer texts would stall all streams for a millisecond.
"""

FAST_THREAD_CHARS = 8192
"""Number of characters from which fastokens encodes in a thread.

Shorter texts mostly take 0.2 ms, and 2.5 ms if all words are new.
"""

NUM_THREADS = 2
"""Number of threads. Each keeps fastokens' table of words, 16 MiB with a large vocabulary.

The library itself distributes a long text over all cores.
"""

ODD_SPACE = "\u180e"
"""White space only in PCRE2, with which fastokens splits texts for some tokenizers."""

_ANY = "a"


class TextEncoder:
    """The encoder of one tokenizer; it may be used from several threads.

    Args:
        exact: the reference tokenizer, without truncation and padding.

    Attributes:
        reason: why fastokens is not used; empty if it is.
    """

    def __init__(self, exact: tokenizers.Tokenizer) -> None:
        self._exact = exact
        self._fast: fastokens.Tokenizer | None = None
        self.reason = "not loaded yet"
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    @property
    def library(self) -> str:
        """The library in use."""
        return "tokenizers" if self._fast is None else "fastokens"

    async def speed_up(self, file: Path) -> None:
        """Switches to fastokens if it can read the tokenizer and agrees with it on test texts.

        Takes a second of processor time with a large vocabulary; other texts are encoded meanwhile.

        Args:
            file: the tokenizer.json that `exact` was read from.
        """
        loop = asyncio.get_running_loop()
        fast, self.reason = await loop.run_in_executor(self._threads, self._agreeing, file)
        if fast is not None:
            fast.encode(_ANY)  # makes this thread's word table now, not with the first prompt
        self._fast = fast

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; long texts do not block the event loop."""
        if len(text) <= (THREAD_CHARS if self._fast is None else FAST_THREAD_CHARS):
            return self._encode(text, add_special_tokens, False)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._encode, text, add_special_tokens, True
        )

    def _encode(self, text: str, special: bool, aside: bool) -> tuple[int, ...]:
        """Returns the token ids of a text.

        Args:
            special: add special tokens.
            aside: this is not the event loop's thread, which must be able to run meanwhile.
        """
        fast = self._fast
        if fast is not None and ODD_SPACE not in text:
            # Random text may exceed the limits of the library's regular expressions.
            with contextlib.suppress(ValueError):
                if not aside:
                    return tuple(fast.encode(text, add_special_tokens=special).ids)
                (whole,) = fast.encode_batch([text], add_special_tokens=special)
                return tuple(whole.ids)
        # The method for one text is slower, and holds the interpreter's lock throughout.
        (whole,) = self._exact.encode_batch_fast([text], add_special_tokens=special)
        return tuple(whole.ids)

    def _agreeing(self, file: Path) -> tuple[fastokens.Tokenizer | None, str]:
        """Loads the faster tokenizer; returns it, or the reason not to use it."""
        try:
            fast = fastokens.Tokenizer.from_file(str(file))
            fast.no_truncation()
            fast.no_padding()
            differs = first_difference(self._exact, fast)
        except ValueError as error:
            return None, str(error)
        if differs is not None:
            return None, f"other ids for {differs!r}"
        fast.encode_batch([_ANY])  # makes the word tables now: a tenth of a second
        return fast, ""
