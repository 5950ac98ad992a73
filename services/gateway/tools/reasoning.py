"""Separates a model's thinking from its answer, with one format per model family.

Readers take text in pieces of any size and return the decided part at once, so streams and whole
answers use the same code. Names are those of vLLM's `--reasoning-parser`. Pure.
Tests: tests/unit/gateway/tools/test_reasoning.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.errors import ConfigError
from services.gateway.tools.harmony import ANALYSIS, HarmonyReader
from services.gateway.tools.held_text import HeldText
from services.gateway.tools.told import Told

TAIL_TOKENS = 8
"""Number of last prompt tokens that show whether the prompt has opened or closed the thinking."""


class ReasoningFamily(enum.Enum):
    """A format of marks around the thinking."""

    QWEN3 = "qwen3"
    """`<think>…</think>`; the prompt or the model opens it."""
    DEEPSEEK_R1 = "deepseek_r1"
    """Like qwen3, but the answer begins with thinking even without a start mark."""
    MISTRAL = "mistral"
    """`[THINK]…[/THINK]`; the marks are special tokens."""
    OPENAI_GPTOSS = "openai_gptoss"
    """Harmony's channel `analysis`; the marks are special tokens."""

    @property
    def marks(self) -> tuple[str, str]:
        """The marks that open and close the thinking."""
        return _MARKS.get(self, _TAGS)

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the marks are special tokens, which the text must keep."""
        return self in _MARKS


_TAGS = ("<think>", "</think>")
_MARKS = {
    ReasoningFamily.MISTRAL: ("[THINK]", "[/THINK]"),
    ReasoningFamily.OPENAI_GPTOSS: (ANALYSIS, "<|end|>"),
}
_AFTER_TOOLS = ("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")


def reasoning_of_template(source: str) -> ReasoningFamily | None:
    """The family of a chat template; None if it has no thinking."""
    if "[THINK]" in source:
        return ReasoningFamily.MISTRAL
    if "<|channel|>analysis" in source:
        return ReasoningFamily.OPENAI_GPTOSS
    if "</think>" not in source:
        return None
    # In DeepSeek's own template, the model opens the thinking, or in newer ones the prompt.
    is_deepseek = "<｜Assistant｜>" in source
    return ReasoningFamily.DEEPSEEK_R1 if is_deepseek else ReasoningFamily.QWEN3


def reasoning_named(word: str, source: str) -> ReasoningFamily | None:
    """The family that a config names; `auto` detects it in the chat template.

    Raises:
        ConfigError: the word names no family.
    """
    if word == "auto":
        return reasoning_of_template(source)
    if word == "none":
        return None
    words = {family.value: family for family in ReasoningFamily}
    if word not in words:
        allowed = ", ".join(["auto", *words, "none"])
        raise ConfigError(f"model.reasoning_parser must be one of {allowed}, got {word!r}")
    return words[word]


@dataclass(frozen=True, slots=True)
class Thinking:
    """The state in which a call's generations begin.

    Attributes:
        is_open: they begin inside the thinking.
    """

    family: ReasoningFamily
    is_open: bool

    def parser(self) -> ThinkingReader:
        """A reader of one generation."""
        if self.family is ReasoningFamily.OPENAI_GPTOSS:
            return HarmonyReader()
        return ReasoningParser(*self.family.marks, is_open=self.is_open)


def thinking_at(
    family: ReasoningFamily | None, prompt_ids: Sequence[int], token_text: Callable[[int], str]
) -> Thinking | None:
    """The state in which a generation begins; None if thinking is not searched for."""
    if family is None:
        return None
    return thinking_after(family, "".join(map(token_text, prompt_ids[-TAIL_TOKENS:])))


def thinking_after(family: ReasoningFamily, tail: str) -> Thinking:
    """The state in which a generation begins after a prompt.

    Args:
        tail: the end of the prompt's text, including special tokens.
    """
    start, end = family.marks
    tail = tail.rstrip()
    # The template closed the thinking: this request should not think. After tool results,
    # DeepSeek's models answer without thinking.
    if tail.endswith((end, *_AFTER_TOOLS)):
        return Thinking(family, is_open=False)
    return Thinking(family, tail.endswith(start) or family is ReasoningFamily.DEEPSEEK_R1)


class ThinkingReader(Protocol):
    """Reads the text of one generation."""

    @property
    def is_answer(self) -> bool:
        """Whether all further text is the answer."""
        ...

    def push(self, text: str) -> Told:
        """Adds text; returns the part of it that is decided now."""
        ...

    def finish(self) -> Told:
        """Returns the rest, at the end of the text."""
        ...


class _Stage(enum.Enum):
    OPENING = "opening"
    THINKING = "thinking"
    CLOSED = "closed"
    ANSWER = "answer"


class ReasoningParser:
    """Reads the text of one generation.

    Args:
        start, end: marks around the thinking.
        is_open: the prompt ends with the start mark; the text may repeat it.
    """

    def __init__(self, start: str, end: str, *, is_open: bool) -> None:
        self._start = start
        self._is_open = is_open
        self._stage = _Stage.OPENING
        self._before: list[str] = []  # leading white space of the text
        self._begun = ""  # the text after it, which may be the start mark
        self._thinking = HeldText(end)
        self._has_thought = False

    @property
    def is_answer(self) -> bool:
        """Whether all further text is the answer."""
        return self._stage is _Stage.ANSWER

    def push(self, text: str) -> Told:
        """Adds text; returns the part of it that is decided now."""
        reasoning, rest = "", text
        if self._stage is _Stage.OPENING:
            rest = self._open(text)
        if self._stage is _Stage.THINKING:
            reasoning, rest = self._think(rest)
        return Told(reasoning, self._answer(rest))

    def finish(self) -> Told:
        """Returns the rest, at the end of the text."""
        if self._stage is _Stage.OPENING:
            held = "".join((*self._before, self._begun))
            return Told(held, "") if self._is_open else Told("", held)
        return Told(self._thinking.finish(), "")

    def _open(self, text: str) -> str:
        """Looks for the start mark. Returns the text that is still to be read."""
        text = self._begun + text
        bare = text.lstrip()
        if len(bare) < len(text):
            self._before.append(text[: len(text) - len(bare)])
        self._begun = bare
        if not bare or (len(bare) < len(self._start) and self._start.startswith(bare)):
            return ""
        if bare.startswith(self._start):
            self._stage = _Stage.THINKING
            return bare.removeprefix(self._start)
        if self._is_open:
            self._stage = _Stage.THINKING
            return bare
        self._stage = _Stage.ANSWER
        return "".join((*self._before, bare))

    def _think(self, text: str) -> tuple[str, str]:
        """Returns the thinking that is decided, and the text after its end mark."""
        if not self._has_thought:  # white space before the first thought is dropped
            text = text.lstrip()
            self._has_thought = bool(text)
        shown, after = self._thinking.push(text)
        if after is None:
            return shown, ""
        self._stage = _Stage.CLOSED
        return shown, after

    def _answer(self, text: str) -> str:
        """Returns the answer. After thinking, leading white space is dropped."""
        if self._stage is _Stage.CLOSED:
            text = text.lstrip()
            if text:
                self._stage = _Stage.ANSWER
        return text if self._stage is _Stage.ANSWER else ""


class Thoughts:
    """Reads all generations of one call."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._parsers: dict[int, ThinkingReader] = {}

    def is_answer(self, index: int) -> bool:
        """Whether a generation's thinking is over and all further text is its answer."""
        return index in self._parsers and self._parsers[index].is_answer

    def told(self, index: int, text: str, *, last: bool) -> Told:
        """Adds text of one generation; returns its thinking and answer.

        Args:
            last: this is the end of the text.
        """
        if index not in self._parsers:
            self._parsers[index] = self._thinking.parser()
        parser = self._parsers[index]
        told = parser.push(text)
        rest = parser.finish() if last else Told("", "")
        return Told(told.reasoning + rest.reasoning, told.answer + rest.answer)
