"""What the soak asks for: requests of all kinds, each with one right answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.mesh_processes import MODEL, VOCAB_SIZE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_WORDS = (
    "the",
    "path",
    "module",
    "joins",
    "names",
    "of",
    "files",
    "and",
    "returns",
    "what",
    "a",
    "loop",
)
_NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": _NUMBER},
}
_TOKENS_OF_WHOLE_ANSWERS = 400


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        path: of the API.
        body: without `stream`.
    """

    path: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class ChoiceText:
    """What one choice said, whatever pieces it came in.

    Attributes:
        calls: name and arguments of each tool call.
        finish: why it ended; None as long as it did not.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[str] = field(default_factory=list)
    finish: str | None = None

    def begins(self, whole: ChoiceText) -> bool:
        """Whether this is the beginning of that, or all of it."""
        count = len(self.token_ids)
        return whole.text.startswith(self.text) and whole.token_ids[:count] == self.token_ids


@dataclass(slots=True)
class Said:
    """All that one answer said.

    Attributes:
        ends: how often a choice said that it ended.
    """

    choices: dict[int, ChoiceText] = field(default_factory=dict)
    ends: int = 0

    def add(self, body: Mapping[str, Any]) -> None:
        """Adds a whole answer or a piece of a stream."""
        for piece in body.get("choices", ()):
            choice = self.choices.setdefault(piece["index"], ChoiceText())
            message = piece.get("delta") or piece.get("message") or piece
            choice.text += message.get("text") or message.get("content") or ""
            choice.token_ids += piece.get("token_ids") or []
            for number, call in enumerate(message.get("tool_calls") or ()):
                place = call.get("index", number)
                choice.calls += [""] * (place + 1 - len(choice.calls))
                function = call["function"]
                choice.calls[place] += function.get("name") or ""
                choice.calls[place] += function.get("arguments") or ""
            if piece.get("finish_reason"):
                self.ends += 1
                choice.finish = piece["finish_reason"]

    def begins(self, whole: Said) -> bool:
        """Whether every choice is the beginning of the same one of a whole answer."""
        return all(
            index in whole.choices and choice.begins(whole.choices[index])
            for index, choice in self.choices.items()
        )


def some_cases(count: int, seed: int, *, structures: bool) -> list[Case]:
    """Requests of all kinds; many share a prefix with others.

    Args:
        structures: some must follow one, which needs a model that ends by itself.
    """
    draw = random.Random(f"cases {seed}")
    prefixes = [[draw.randrange(3, VOCAB_SIZE) for _ in range(96 * n)] for n in range(6)]
    return [
        _chat(draw, structures) if draw.random() < 0.3 else _completion(draw, draw.choice(prefixes))
        for _ in range(count)
    ]


def with_stop(case: Case, said: Said, draw: random.Random) -> Case:
    """The same request, stopped by a piece of its own answer."""
    text = said.choices[0].text
    if len(text) < 8:
        return case
    begin = draw.randrange(len(text) // 2, len(text) - 3)
    stop = text[begin : begin + 3]
    # What cannot be decoded is no text that anybody could ask for.
    return case if "\ufffd" in stop else Case(case.path, {**case.body, "stop": [stop, "§§"]})


def _common(draw: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": draw.choice([0, 0.7, 1.0]),
        "seed": draw.randrange(1 << 20),
        "n": draw.choice([1, 1, 1, 2, 3]),
        "priority": draw.randrange(-2, 3),
        "cache_salt": draw.choice(["", "", "one", "two"]),
        "return_token_ids": True,
    }
    if draw.random() < 0.2:
        body |= {"top_p": 0.9, "top_k": 50}
    if draw.random() < 0.2:
        body["presence_penalty"] = 0.5
    return body


def _completion(draw: random.Random, prefix: list[int]) -> Case:
    tail = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(5, 120))]
    body = _common(draw)
    body |= {"prompt": prefix + tail, "max_tokens": draw.choice([1, 2, 17, 40, 120])}
    body["ignore_eos"] = draw.random() < 0.8
    return Case(COMPLETIONS, body)


def _chat(draw: random.Random, structures: bool) -> Case:
    words = " ".join(draw.choices(_WORDS, k=draw.randint(5, 60)))
    body = _common(draw)
    body |= {"messages": [{"role": "user", "content": words}], "max_tokens": draw.randint(1, 60)}
    kind = draw.random()
    if not structures or kind < 0.4:
        return Case(CHAT, body)
    body["max_tokens"] = _TOKENS_OF_WHOLE_ANSWERS
    if kind < 0.7:
        named = {"type": "function", "function": {"name": "look"}}
        choice = draw.choice([named, "required", "none"])
        body |= {"tools": [_TOOL], "tool_choice": choice, "n": 1}
    else:
        schema = {"name": "number", "schema": _NUMBER}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return Case(CHAT, body)


def as_text(case: Case) -> str:
    """The request in one line, to be asked again by hand."""
    return f"{case.path} {json.dumps(case.body)}"
