from __future__ import annotations

import random

import pytest

from benchmarks.chat_prompts import KINDS, MAX_CHARS, MIN_CHARS, chat, chats, growing, text


def test_chats_differ_and_come_again_with_their_seed() -> None:
    first = chats(60, seed=1)
    assert first == chats(60, seed=1)
    assert first != chats(60, seed=2)
    assert [kind for kind, _ in first[: len(KINDS)]] == list(KINDS)
    assert len({messages[-1]["content"] for _, messages in first}) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_of_its_kind_and_as_long_as_wanted(kind: str) -> None:
    rng = random.Random(3)
    for _ in range(20):
        content = chat(kind, rng)[-1]["content"]
        assert MIN_CHARS // 3 < len(content) < MAX_CHARS + 20


def test_text_is_in_its_script() -> None:
    rng = random.Random(5)
    found = {kind: text(kind, rng, 8000) for kind in KINDS}
    strange = {kind: sum(not char.isascii() for char in found[kind]) for kind in KINDS}
    assert max(strange["English"], strange["code"]) < 100 < min(strange["German"], 200)
    assert min(strange[kind] for kind in ("Russian", "Chinese", "Japanese", "Arabic")) > 5000
    assert "’" in found["quotes"]
    assert "🎉" in found["emoji"]


def test_growing_chats_begin_with_what_was_sent_before() -> None:
    sent = list(growing(3, turns=4, seed=1))
    assert len(sent) == 12
    for earlier, later in zip(sent, sent[3:], strict=False):
        assert later[: len(earlier)] == earlier
        assert len(later) == len(earlier) + 2
        assert later[-1]["role"] == "user"
