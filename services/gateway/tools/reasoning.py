"""What a model thinks before it answers: told apart from the answer, one form per model family.

Reads text in pieces of any size and says at once what is sure, so a stream and a whole answer are
read by the same code. Names are those of vLLM's `--reasoning-parser`. Pure.
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
"""Last tokens of a prompt that say whether it has opened or closed the thinking."""


class ReasoningFamily(enum.Enum):
    """How a model marks its thinking."""

    QWEN3 = "qwen3"
    """`<think>…</think>`, where the prompt or the model opens it."""
    DEEPSEEK_R1 = "deepseek_r1"
    """As qwen3, but the answer begins with thinking also where nobody opens it."""
    MISTRAL = "mistral"
    """`[THINK]…[/THINK]`; the marks are special tokens."""
    OPENAI_GPTOSS = "openai_gptoss"
    """Harmony's channel `analysis`; the marks are special tokens."""

    @property
    def marks(self) -> tuple[str, str]:
        """What opens the thinking and what closes it."""
        return _MARKS.get(self, _TAGS)

    @property
    def keeps_special_tokens(self) -> bool:
        """The marks are special tokens, which the text must then have."""
        return self in _MARKS


_TAGS = ("<think>", "</think>")
_MARKS = {
    ReasoningFamily.MISTRAL: ("[THINK]", "[/THINK]"),
    ReasoningFamily.OPENAI_GPTOSS: (ANALYSIS, "<|end|>"),
}
_AFTER_TOOLS = ("<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")


def reasoning_of_template(source: str) -> ReasoningFamily | None:
    """The family that a chat template is of; None if it knows no thinking."""
    if "[THINK]" in source:
        return ReasoningFamily.MISTRAL
    if "<|channel|>analysis" in source:
        return ReasoningFamily.OPENAI_GPTOSS
    if "</think>" not in source:
        return None
    # DeepSeek's own template: the model opens the thinking, or the newer prompt does.
    is_deepseek = "<｜Assistant｜>" in source
    return ReasoningFamily.DEEPSEEK_R1 if is_deepseek else ReasoningFamily.QWEN3


def reasoning_named(word: str, source: str) -> ReasoningFamily | None:
    """The family that a config names; `auto` reads it off the chat template.

    Raises:
        ConfigError: another word.
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
    """How the generations of one call begin.

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
    """How a generation begins after a prompt; None where its text is not read for thinking."""
    if family is None:
        return None
    return thinking_after(family, "".join(map(token_text, prompt_ids[-TAIL_TOKENS:])))


def thinking_after(family: ReasoningFamily, tail: str) -> Thinking:
    """How a generation begins after a prompt.

    Args:
        tail: the end of the prompt's text, special tokens included.
    """
    start, end = family.marks
    tail = tail.rstrip()
    # The template closed it: this request is not to think. What tools gave DeepSeek's models
    # answer at once.
    if tail.endswith((end, *_AFTER_TOOLS)):
        return Thinking(family, is_open=False)
    return Thinking(family, tail.endswith(start) or family is ReasoningFamily.DEEPSEEK_R1)


class ThinkingReader(Protocol):
    """Reads one generation."""

    @property
    def is_answer(self) -> bool:
        """Whether all that follows is the answer, as it is."""
        ...

    def push(self, text: str) -> Told:
        """What is sure after more text."""
        ...

    def finish(self) -> Told:
        """What is left when the text ends."""
        ...


class _Stage(enum.Enum):
    OPENING = "opening"
    THINKING = "thinking"
    CLOSED = "closed"
    ANSWER = "answer"


class ReasoningParser:
    """Reads one generation.

    Args:
        start, end: marks around the thinking.
        is_open: the prompt has the start mark; the text may repeat it.
    """

    def __init__(self, start: str, end: str, *, is_open: bool) -> None:
        self._start = start
        self._is_open = is_open
        self._stage = _Stage.OPENING
        self._before: list[str] = []  # white space that the text begins with
        self._begun = ""  # what follows it, perhaps the start mark
        self._thinking = HeldText(end)
        self._has_thought = False

    @property
    def is_answer(self) -> bool:
        """Whether all that follows is the answer, as it is."""
        return self._stage is _Stage.ANSWER

    def push(self, text: str) -> Told:
        """What is sure after more text."""
        reasoning, rest = "", text
        if self._stage is _Stage.OPENING:
            rest = self._open(text)
        if self._stage is _Stage.THINKING:
            reasoning, rest = self._think(rest)
        return Told(reasoning, self._answer(rest))

    def finish(self) -> Told:
        """What is left when the text ends."""
        if self._stage is _Stage.OPENING:
            held = "".join((*self._before, self._begun))
            return Told(held, "") if self._is_open else Told("", held)
        return Told(self._thinking.finish(), "")

    def _open(self, text: str) -> str:
        """Looks for the start mark; returns what is to be read on."""
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
        """The thinking that is sure, and what follows its end."""
        if not self._has_thought:  # white space before the first thought is dropped
            text = text.lstrip()
            self._has_thought = bool(text)
        shown, after = self._thinking.push(text)
        if after is None:
            return shown, ""
        self._stage = _Stage.CLOSED
        return shown, after

    def _answer(self, text: str) -> str:
        """The answer; white space before it is dropped where there was thinking."""
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
        """Whether the thinking of one of them is over, and the answer has begun."""
        return index in self._parsers and self._parsers[index].is_answer

    def told(self, index: int, text: str, *, last: bool) -> Told:
        """What more text of one of them says.

        Args:
            last: no more follows.
        """
        if index not in self._parsers:
            self._parsers[index] = self._thinking.parser()
        parser = self._parsers[index]
        told = parser.push(text)
        rest = parser.finish() if last else Told("", "")
        return Told(told.reasoning + rest.reasoning, told.answer + rest.answer)
