from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.normalizers import NFC, Lowercase

from services.gateway import word_encoder as words
from services.gateway.tokenizer import ChatTemplate, TextTokenizer
from services.gateway.word_encoder import MAX_NEW_WORDS, MAX_WORD_CHARS, WordEncoder, word_encoder
from tests.unit.gateway.tiny_model import make_tokenizer

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def splitting(regex: str) -> Tokenizer:
    """The test's vocabulary, with words as newer models have them."""
    tokenizer = make_tokenizer()
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.normalizer = NFC()
    return tokenizer


TOKENIZERS = {"gpt2": make_tokenizer(), "qwen": splitting(QWEN), "llama3": splitting(LLAMA_3)}
ENCODERS = {name: word_encoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def encoded(encoder: WordEncoder, text: str) -> tuple[int, ...] | None:
    """What the table says when it knows the words."""
    for _ in range(len(text)):
        if (token_ids := encoder.encode(text)) is not None:
            return token_ids
    return encoder.encode(text)


ASCII = st.text(st.characters(max_codepoint=127), max_size=40)
TRICKY = st.text(st.sampled_from(list(" \n\r\t'sSLl1290a.<|>")), max_size=40)
PARTS = st.sampled_from(["<|start|>", "<|end|>", "<|start", "'LL", "  \n ", " the mesh"])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(parts=st.lists(ASCII | TRICKY | PARTS, max_size=5))
def test_ids_are_those_of_the_tokenizer(name: str, parts: list[str]) -> None:
    encoder = ENCODERS[name]
    assert encoder is not None
    text = "".join(parts)
    expected = tuple(TOKENIZERS[name].encode(text, add_special_tokens=False).ids)
    assert encoded(encoder, text) == expected
    assert encoder.encode(text) == expected  # once more, now that all is known


def test_other_text_is_left_to_the_tokenizer() -> None:
    encoder = word_encoder(make_tokenizer())
    assert encoder is not None
    assert encoder.encode("naïve") is None


def test_many_new_words_are_learnt_a_few_at_a_time() -> None:
    encoder = word_encoder(make_tokenizer())
    assert encoder is not None
    text = " ".join(f"w{chr(97 + n)}" for n in range(MAX_NEW_WORDS + 1))
    assert encoder.encode(text) is None
    assert encoder.num_words == MAX_NEW_WORDS
    assert encoder.encode(text) is not None


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 3)
    encoder = word_encoder(make_tokenizer())
    assert encoder is not None
    assert encoder.encode("a b c") is not None
    assert encoder.encode("a b d") is None
    assert encoder.num_words == 0
    assert encoder.encode("a b d") is not None
    assert encoder.encode("x" * (MAX_WORD_CHARS + 1)) is None  # the table is full
    assert encoder.encode("x" * (MAX_WORD_CHARS + 1)) is not None
    assert encoder.num_words == 0  # long words are not kept


def _changed(change: Any) -> Tokenizer:
    tokenizer = make_tokenizer()
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "normalizer", Lowercase()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: t.enable_truncation(5),
        lambda t: t.enable_padding(),
        lambda t: t.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)]),
        lambda t: setattr(t.model, "dropout", 0.5),
    ],
)
def test_tokenizers_whose_words_are_not_known_have_no_table(change: Any) -> None:
    assert word_encoder(_changed(change)) is None


def test_an_unknown_expression_or_model_has_no_table() -> None:
    assert word_encoder(splitting(QWEN + "|x")) is None
    settings_ = json.loads(Tokenizer(models.WordLevel({"a": 0}, "a")).to_str())
    assert word_encoder(Tokenizer.from_str(json.dumps(settings_))) is None


@pytest.mark.parametrize("text", ["the mesh", "", "ö the mesh", "the mesh " * 3000])
async def test_special_tokens_around_a_text(text: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 0), ("<|end|>", 1)]
    )
    ours = TextTokenizer(tokenizer, ChatTemplate("", {}))
    for special in (True, False):
        expected = tuple(tokenizer.encode(text, add_special_tokens=special).ids)
        for _ in range(3):  # new words are learnt meanwhile
            assert await ours.encode(text, add_special_tokens=special) == expected


def test_a_piece_of_known_words_is_kept_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = word_encoder(make_tokenizer())
    assert encoder is not None
    known = encoder.encode("the mesh, it is")
    assert (encoder.num_words, encoder.num_pieces) == (5, 4)
    assert encoder.encode("the mesh, it is") == known
    monkeypatch.setattr(words, "MAX_PIECES", 4)
    assert encoder.encode("the is, mesh") is not None
    assert encoder.num_pieces == 2  # those of the last text that were new
