from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, DecodeStream, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE

from services.gateway.text.detokenizer import Detokenizer, StopStrings, WholeTokens
from services.gateway.text.tokenizer import ChatTemplate, TextTokenizer
from tests.unit.gateway.tiny_model import EOS, make_tokenizer

FAST = make_tokenizer()


@example(text="<|start|>")
@given(text=st.text(max_size=40))
def test_text_survives_one_token_at_a_time(text: str) -> None:
    # The text may have the name of a special token.
    detokenizer = Detokenizer(FAST, skip_special_tokens=False)
    # A replacement character at the end cannot be told from one that is incomplete.
    token_ids = FAST.encode(text + ".").ids
    pieces = [detokenizer.push([token_id]).text for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish() == text + "."


WHOLE = TextTokenizer(FAST, ChatTemplate("", {})).whole
TOKENS = st.one_of(
    st.lists(st.integers(0, FAST.get_vocab_size() - 1), max_size=40),
    st.text("aö🙂\ufffd the", max_size=20).map(lambda text: FAST.encode(text).ids),
)


@given(prompt=TOKENS, token_ids=TOKENS, skip=st.booleans())
def test_whole_tokens_change_no_text(prompt: list[int], token_ids: list[int], skip: bool) -> None:
    assert WHOLE is not None
    plain = Detokenizer(FAST, prompt, skip_special_tokens=skip)
    quick = Detokenizer(FAST, prompt, skip_special_tokens=skip, whole=WHOLE)
    for token_id in token_ids:
        assert quick.push([token_id]) == plain.push([token_id])


@pytest.mark.parametrize("whole", [WHOLE, None])
def test_a_half_character_before_a_mark_is_not_completed(whole: WholeTokens | None) -> None:
    half, rest = FAST.encode("ö").ids
    (letter,) = FAST.encode("a").ids
    completed = Detokenizer(FAST, [letter, half], whole=whole)
    assert completed.push([rest, letter]).text == "öa"
    marked = Detokenizer(FAST, [letter, half, EOS], whole=whole)
    assert marked.push([letter, letter]).text == "aa"


def test_only_byte_level_tokens_are_whole_by_themselves() -> None:
    assert WHOLE is not None
    half = FAST.encode("ö").ids[0]
    (comma,) = FAST.encode(",").ids
    assert (WHOLE[comma], WHOLE[half], WHOLE[EOS], WHOLE[10**6]) == (",", "", "", "")
    assert [WHOLE.ends_whole(token) for token in (comma, half, EOS)] == [True, False, True]
    assert TextTokenizer(BYTE_FALLBACK, ChatTemplate("", {})).whole is None


def test_incomplete_character_is_never_sent(tokenizer: TextTokenizer) -> None:
    token_ids = FAST.encode("a🙂").ids
    detokenizer = Detokenizer(FAST)
    assert detokenizer.push(token_ids[:-1]).text + detokenizer.finish() == "a"


def _byte_fallback() -> Tokenizer:
    """A tokenizer that spells unknown text in bytes, each of them a token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁the", "ü"]
    vocab = {word: index for index, word in enumerate(words)}
    fast = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    fast.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    return fast


BYTE_FALLBACK = _byte_fallback()
VOCAB = BYTE_FALLBACK.get_vocab()


@given(token_ids=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=40))
def test_bytes_that_are_no_character_end_no_request(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK)
    text = "".join(detokenizer.push([token_id]).text for token_id in token_ids)
    again = Detokenizer(BYTE_FALLBACK).push(token_ids).text
    assert text == again
    the = VOCAB["▁the"]
    for _ in range(2):
        detokenizer.push([the])
    assert detokenizer.push([the]).text == " the"


def test_a_byte_that_changes_the_text_before_it_is_dropped() -> None:
    newline, lead = VOCAB["<0x0A>"], VOCAB["<0xF0>"]
    the = VOCAB["▁the"]
    detokenizer = Detokenizer(BYTE_FALLBACK)
    pieces = [detokenizer.push([each]).text for each in (the, newline, lead, the, the)]
    assert pieces == ["the", "\n", "", " the", " the"]


@pytest.mark.parametrize("token", ["half a character", "special"])
def test_tokens_without_text_cost_no_more_the_more_there_are(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    token_id = EOS if token == "special" else FAST.encode("🙂").ids[0]
    longest = 0

    class Counting:
        def __init__(self, ids: list[int], skip: bool) -> None:
            self._stream = DecodeStream(ids, skip)
            self._count = len(ids)

        def step(self, fast: Tokenizer, token_id: int) -> str | None:
            nonlocal longest
            self._count += 1
            longest = max(longest, self._count)
            return self._stream.step(fast, token_id)

    monkeypatch.setattr("services.gateway.text.detokenizer.DecodeStream", Counting)
    detokenizer = Detokenizer(FAST)
    word = FAST.encode(" mesh").ids
    before = detokenizer.push(word).text
    assert detokenizer.push([token_id] * 1000).text == ""
    assert longest < 50
    assert detokenizer.push(word).text.endswith(before)


def test_special_tokens_are_skipped_or_kept() -> None:
    token_ids = [*FAST.encode("a").ids, 0]
    assert Detokenizer(FAST).push(token_ids).text == "a"
    assert Detokenizer(FAST, skip_special_tokens=False).push(token_ids).text == "a<|start|>"


def test_text_of_the_stop_token_is_left_out() -> None:
    token_ids = FAST.encode("a!").ids
    assert Detokenizer(FAST).push(token_ids, ends_with_stop_token=True).text == "a"
    kept = Detokenizer(FAST, include_stop=True).push(token_ids, ends_with_stop_token=True)
    assert kept.text == "a!"
    assert kept.num_used == len(token_ids)


def test_tokens_after_the_stop_string_are_not_used() -> None:
    token_ids = [FAST.encode(char).ids[0] for char in "abcXYdef"]
    piece = Detokenizer(FAST, stops=["XY"]).push(token_ids)
    assert (piece.text, piece.num_used, piece.stop) == ("abc", 5, "XY")


def test_stop_strings_wait_for_min_tokens() -> None:
    token_ids = [FAST.encode(char).ids[0] for char in "aXbX"]
    piece = Detokenizer(FAST, stops=["X"], min_tokens=3).push(token_ids)
    assert (piece.text, piece.num_used) == ("aXb", 4)


@pytest.mark.parametrize("num_missing", [1, 2, 3])
def test_a_prompt_that_ends_in_a_character_gives_no_text_either(num_missing: int) -> None:
    token_ids = FAST.encode("the mesh 🙂").ids
    prompt, rest = token_ids[:-num_missing], token_ids[-num_missing:]
    assert Detokenizer(FAST, prompt).push(rest).text == "🙂"
    assert "mesh" not in Detokenizer(FAST, prompt).push(FAST.encode(" moves").ids).text
    assert Detokenizer(FAST, token_ids).push(FAST.encode(" moves").ids).text == " moves"
    no_text = prompt + prompt[-1:] * 6
    text = Detokenizer(FAST, no_text).push(FAST.encode(" moves").ids).text
    assert text.lstrip("\N{REPLACEMENT CHARACTER}") == " moves"


def test_prompt_gives_context_but_no_text() -> None:
    prompt = FAST.encode("the mesh").ids
    assert Detokenizer(FAST, prompt).push([*FAST.encode(" moves").ids, EOS]).text == " moves"


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "stop"),
    [
        (["STOP"], ["a S", "TO", "P b"], ["a ", "", ""], "STOP"),
        (["STOP"], ["a STO", "X"], ["a ", "STOX"], None),
        (["b", "ab"], ["xab"], ["x"], "ab"),  # the earliest, not the first in the list
        (["aab"], ["aaab"], ["a"], "aab"),
        (["\n\n"], ["a\n", "\n"], ["a", ""], "\n\n"),
        (["END", "STOP"], ["a E", "N", "S", "TO", "P"], ["a ", "", "EN", "", ""], "STOP"),
        ([], ["anything"], ["anything"], None),
    ],
)
def test_stop_strings(
    stops: list[str], pieces: list[str], sent: list[str], stop: str | None
) -> None:
    finder = StopStrings(stops)
    results = [finder.push(piece) for piece in pieces]
    assert [text for text, _ in results] == sent
    assert results[-1][1] == stop


def test_held_text_comes_at_the_end() -> None:
    finder = StopStrings(["STOP"])
    assert finder.push("a ST")[0] == "a "
    assert finder.flush() == "ST"
    assert finder.flush() == ""


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    include=st.booleans(),
)
def test_pieces_make_no_difference(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Whatever the pieces, the output is the text up to the stop string that is complete first."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    finder = StopStrings(stops, include=include)
    sent, found = "", None
    for start, end in pairwise(edges):
        piece, found = finder.push(text[start:end])
        sent += piece
        if found is not None:
            break
    if found is None:
        assert sent + finder.flush() == text
        assert not any(stop in text for stop in stops)
        return
    at = len(sent) - len(found) if include else len(sent)
    assert text[at:].startswith(found)
    assert sent == text[: len(sent)]
    # Nothing that was sent holds a whole stop string, except the one that is included.
    assert not any(stop in text[:at] for stop in stops)
