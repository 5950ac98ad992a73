from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fastokens
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.text.text_encoder import (
    FAST_THREAD_CHARS,
    NUM_THREADS,
    ODD_SPACE,
    THREAD_CHARS,
    TextEncoder,
)
from tests.unit.gateway.tokenizer_kinds import EXACT, FAST, SENTENCES, SPECIAL

PARTS = [
    *SPECIAL,
    *SENTENCES,
    *("<tool_call>", "<think>", "<|im_st", "<0x41>", "<n>", "<|end|>", "<|end|>  ", "<｜User｜>"),
    *("<one>", "a<one>b", " <both> ", " <left>", "'LL", "'s", "’s", "'Ve", "hello Hello HELLO"),
    *(" ", "  ", "     ", "  \n ", "\r\n", "\t\t", "\n\n\n", " \n\n  x", "\x00", "\x0b", "\x1c"),
    *("\u00a0", "\u3000", "\u200b", "\u200d", "\ufeff", "\u2028", "\u0085", "\u1680", ODD_SPACE),
    *("def f(x):\n    return x+1\n", "12345678", "1", "٣٤٥", "½", "Ⅷ", "/path/to", "!!!", "..."),
    *("é", "e\u0301\u0323", "\u0301", "ﬁ", "Å", "\u212b", "\u1100\u1161", "각", "क्षि", "ǅ", "ʰ"),
    *("ſ", "İ", "ı", "ß", "ẞ", "Σς", "aB", "HTTPServer", "▁", "▁▁", "Ġ", "Ċ", "\ufffd"),
    *("🙂", "👍🏽", "🇩🇪", "\U000e0041", "\U0010ffff", "\U00020000", "\ud7ff", "\ue000"),
    *("a" * 300, "ab" * 200, "=" * 100, "x" * 70 + " ", "中" * 80, "😀" * 30),
]
TEXTS = st.text(max_size=40) | st.text(st.sampled_from(" \n\r\t'sSLl1290a.<|>/éA中🙂\u0301"))
MIXED = st.lists(TEXTS | st.sampled_from(PARTS), max_size=8).map("".join)


@cache
def saved(kind: str) -> str:
    """The kind's tokenizer.json; training is deterministic."""
    return str({**FAST, **EXACT}[kind]().to_str())


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], tuple[Tokenizer, Path]]:
    def make(text: str) -> tuple[Tokenizer, Path]:
        file = tmp_path / "tokenizer.json"
        file.write_text(text)
        return Tokenizer.from_str(text), file

    return make


def sped_up(exact: Tokenizer, file: Path) -> TextEncoder:
    encoder = TextEncoder(exact)
    asyncio.run(encoder.speed_up(file))
    return encoder


def ids(encoder: TextEncoder, text: str, special: bool) -> list[int]:
    return list(asyncio.run(encoder.encode(text, add_special_tokens=special)))


Made = Callable[[str], tuple[Tokenizer, Path]]


@pytest.mark.parametrize("kind", FAST)
def test_the_fast_library_says_the_same_of_every_kind(kind: str, made: Made) -> None:
    exact, file = made(saved(kind))
    encoder = sped_up(exact, file)
    assert (encoder.library, encoder.reason) == ("fastokens", "")
    around = [*PARTS, *(f"a{part} {part}\n{part}" for part in PARTS), "", "".join(PARTS)]
    # Every character of the first planes, but those that are alike by the thousands.
    codes = [*range(0x3500), *range(0x3500, 0xD800, 97), *range(0xE000, 0x20000, 23)]
    chars = [f"a  {chr(code)}1{chr(code)}b" for code in codes]
    around += ["".join(chars[start : start + 40]) for start in range(0, len(chars), 40)]

    async def compare() -> None:
        for special in (False, True):
            expected = exact.encode_batch_fast(around, add_special_tokens=special)
            for text, right in zip(around, expected, strict=True):
                assert list(await encoder.encode(text, add_special_tokens=special)) == right.ids

    asyncio.run(compare())

    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(text=MIXED, special=st.booleans())
    def generated(text: str, special: bool) -> None:
        assert ids(encoder, text, special) == exact.encode(text, add_special_tokens=special).ids

    generated()


@pytest.mark.parametrize("kind", EXACT)
def test_kinds_that_the_fast_library_does_not_know_are_left_to_the_other(
    kind: str, made: Made
) -> None:
    exact, file = made(saved(kind))
    encoder = sped_up(exact, file)
    assert encoder.library == "tokenizers"
    assert "unsupported" in encoder.reason
    for text in PARTS[:40]:
        assert ids(encoder, text, True) == exact.encode(text, add_special_tokens=True).ids


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = None

    return change


def _regex(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        assert old in pattern["Regex"]
        pattern["Regex"] = pattern["Regex"].replace(old, new)

    return change


def _added(**flags: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["added_tokens"][-1] |= flags

    return change


def _model(**flags: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"].update(flags)


def _merges_swapped(content: dict[str, Any]) -> None:
    content["model"]["merges"][:60] = reversed(content["model"]["merges"][:60])


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen 2", _without("normalizer")),
        ("qwen 2", _regex(r"|\p{N}|", r"|\p{N}{1,3}|")),
        ("qwen 2", _regex("(?i:", "(?:")),
        ("qwen 2", _regex(r"[\r\n]*|", "|")),
        ("qwen 2", _regex(r"|\s+(?!\S)", "")),
        ("qwen 2", _regex(r"\p{L}+", r"[\p{L}\p{M}]+")),
        ("qwen 2", _regex(r"\s*[\r\n]+|", "")),
        ("o200k", _regex("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")),
        ("deepseek", _regex("{1,3}", "{1,2}")),
        ("gpt2", lambda content: content["pre_tokenizer"].update(use_regex=False)),
        ("gpt2", lambda content: content["pre_tokenizer"].update(add_prefix_space=True)),
        ("gpt2", _merges_swapped),
        ("gpt2", _added(rstrip=True)),
        ("gpt2", _added(lstrip=True)),
        ("gpt2", _added(single_word=True)),
        ("gpt2", _added(content="<|end|>")),
        ("llama 3", _without("post_processor")),
        ("llama 2", _without("normalizer")),
        ("llama 2", _model(byte_fallback=False)),
        ("llama 2", lambda content: content["normalizer"]["normalizers"].pop(0)),
        ("gemma", _without("normalizer")),
    ],
)
def test_ids_that_differ_are_found_before_the_fast_library_is_used(
    kind: str, change: Callable[[dict[str, Any]], None], made: Made
) -> None:
    exact, file = made(saved(kind))
    content = json.loads(saved(kind))
    change(content)
    file.write_text(json.dumps(content))
    encoder = sped_up(exact, file)
    assert encoder.library == "tokenizers"
    assert "other ids for" in encoder.reason


def test_truncation_and_padding_of_a_file_are_of_training(made: Made) -> None:
    exact, _ = made(saved("gpt2"))
    exact.enable_truncation(5)
    exact.enable_padding(length=8)
    text = str(exact.to_str())
    exact.no_truncation()
    exact.no_padding()
    encoder = sped_up(exact, made(text)[1])
    assert encoder.library == "fastokens"
    assert len(ids(encoder, "a b c d e f g h i j", True)) > 8
    assert len(ids(encoder, "a", True)) == 1


def test_a_file_that_is_gone_leaves_all_to_the_other(tmp_path: Path) -> None:
    encoder = sped_up(Tokenizer.from_str(saved("gpt2")), tmp_path / "tokenizer.json")
    assert encoder.library == "tokenizers"
    assert "No such file" in encoder.reason


def test_text_on_which_the_fast_library_gives_up(made: Made) -> None:
    exact, file = made(saved("starcoder"))
    encoder = sped_up(exact, file)
    text = "\n" * 1_000_100
    with pytest.raises(ValueError, match="stack size"):
        fastokens.Tokenizer.from_file(str(file)).encode(text)
    assert ids(encoder, text, False) == exact.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["qwen 2", "mistral v3"])
def test_long_texts_let_others_run(kind: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, file = made(saved(kind))
    encoder = sped_up(exact, file)
    is_fast = encoder.library == "fastokens"
    text = "the mesh " * FAST_THREAD_CHARS

    class OnlyBatches:
        """A tokenizer whose other ways hold the interpreter's lock to the end."""

        encode_batch = staticmethod(encoder._fast.encode_batch if encoder._fast else str)
        encode_batch_fast = staticmethod(exact.encode_batch_fast)

    async def turns(length: int) -> int:
        task = asyncio.ensure_future(encoder.encode(text[:length], add_special_tokens=False))
        count = 0
        while not task.done():
            await asyncio.sleep(0)
            count += 1
        assert list(await task) == exact.encode(text[:length], add_special_tokens=False).ids
        return count

    most = FAST_THREAD_CHARS if is_fast else THREAD_CHARS
    assert asyncio.run(turns(most)) == 1  # not worth a thread
    monkeypatch.setattr(encoder, "_fast" if is_fast else "_exact", OnlyBatches())
    assert asyncio.run(turns(most + 1)) > 1
    assert asyncio.run(turns(len(text))) > 1


def test_threads_that_encode_at_once_do_not_disturb_each_other(made: Made) -> None:
    exact, file = made(saved("llama 3"))
    encoder = sped_up(exact, file)
    texts = [sentence * times for sentence in SENTENCES for times in (1, 40, 400)]
    expected = [exact.encode(text, add_special_tokens=False).ids for text in texts]

    async def all_at_once() -> list[tuple[int, ...]]:
        return await asyncio.gather(
            *(encoder.encode(text, add_special_tokens=False) for text in texts)
        )

    for _ in range(5):
        assert [list(each) for each in asyncio.run(all_at_once())] == expected
    assert len(encoder._threads._threads) == NUM_THREADS
