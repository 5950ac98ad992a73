from __future__ import annotations

import pytest

from services.gateway.tools.reasoning import ReasoningFamily, Thinking
from services.gateway.tools.thinking_count import ThinkingCount


def count(text: str, *, is_open: bool = False, num_steps: int = 1) -> int:
    """Counts bytes as tokens, which arrive in as many pieces."""
    thinking = Thinking(ReasoningFamily.QWEN3, is_open)
    counting = ThinkingCount(thinking, lambda token_id: bytes([token_id]))
    raw = list(text.encode())
    found = [counting.of(raw[: len(raw) * step // num_steps]) for step in range(1, num_steps + 1)]
    assert found == sorted(found), "what was thinking stays thinking"
    return found[-1]


@pytest.mark.parametrize("num_steps", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "is_open", "thinking"),
    [
        ("yes", False, ""),
        ("", False, ""),
        ("<b>yes", False, ""),
        ("<think>é</think>yes", False, "<think>é</think>"),
        ("\n<think>a</think></think>yes", False, "\n<think>a</think>"),
        ("a</think>yes", True, "a</think>"),
        ("<think>a</think>yes", True, "<think>a</think>"),
        ("cut", True, "cut"),
        ("<think>cut </thi", False, "<think>cut </thi"),
        ("</think>yes", True, "</think>"),
    ],
)
def test_marks_and_what_is_between_them(
    text: str, is_open: bool, thinking: str, num_steps: int
) -> None:
    assert count(text, is_open=is_open, num_steps=num_steps) == len(thinking.encode())
