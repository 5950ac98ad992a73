"""Tokenizers of the kinds that models have, made in the test.

Vocabularies are trained on the spot; what cuts a text into words is as in the models' files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SENTENCES = [
    "Привет, мир! Как дела сегодня? Это проверка русского текста.",
    "你好，世界！今天天气怎么样？这是一个用于测试的中文句子。",
    "こんにちは世界。今日はいい天気ですね。カタカナとひらがな。",
    "مرحبا بالعالم! كيف حالك اليوم؟ هذا نص عربي. שלום עולם. Γειά σου Κόσμε",
    "Straße, Größe, über, naïve café — “quotes” ‘single’ … €",
    "안녕하세요 세계! नमस्ते दुनिया, आप कैसे हैं? สวัสดีชาวโลก",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪🎉",
    "spaces before line ends \n  and after them \n\n \n  \n\tso that both become tokens \r\n",
]
CORPUS = [text[:3000] for text in list(topics.values())[:60]] + SENTENCES * 30

_ENDS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = (
    rf"(?i:{_ENDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
LLAMA_3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN_3_5 = QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)


def _by_case(ends: str, numbers: str, line: str, but: str = "") -> str:
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    head = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{head}{upper}*{lower}+{ends}|{head}{upper}+{lower}*{ends}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{line}]*|{_SPACES}"


O200K = _by_case(rf"(?i:{_ENDS})?", r"\p{N}{1,3}", "/")
TEKKEN = _by_case("", r"\p{N}", "/")
KIMI = r"[\p{Han}]+|" + _by_case(rf"(?i:{_ENDS})?", r"\p{N}{1,3}", "", r"&&[^\p{Han}]")
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


def _split(regex: str, how: str = "isolated") -> Any:
    return pre.Split(Regex(regex), how)


def _bytes(**settings: bool) -> Any:
    return pre.ByteLevel(**{"add_prefix_space": False, **settings})


def _by(*regexes: str) -> Any:
    return pre.Sequence([*map(_split, regexes), _bytes(use_regex=False)])


@lru_cache(maxsize=1)
def _trained_on_bytes() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _by(O200K)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


@lru_cache(maxsize=1)
def _trained_on_characters() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    codes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=2500, special_tokens=SPECIAL + codes, limit_alphabet=250, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    trained: dict[str, Any] = json.loads(tokenizer.to_str())
    trained["added_tokens"] = [
        token for token in trained["added_tokens"] if token["content"] in SPECIAL
    ]
    trained["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    return trained


def _byte_level(
    words: Any = None,
    normalizer: Any = None,
    around: Any = None,
    added: tuple[AddedToken, ...] = (),
    **model: bool,
) -> Tokenizer:
    trained = json.loads(_trained_on_bytes())
    trained["model"] |= model
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.pre_tokenizer = _bytes() if words is None else words
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if around is not None:
        tokenizer.post_processor = around
    _add(tokenizer, added)
    return tokenizer


def _sentence_piece(
    normalizer: Any = None,
    words: Any = None,
    added: tuple[AddedToken, ...] = (),
    **model: bool,
) -> Tokenizer:
    trained = json.loads(json.dumps(_trained_on_characters()))
    trained["pre_tokenizer"] = None
    trained["model"] |= model
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if words is not None:
        tokenizer.pre_tokenizer = words
    tokenizer.post_processor = _around("<s> $A")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add(tokenizer, added)
    return tokenizer


def _add(tokenizer: Tokenizer, added: tuple[AddedToken, ...]) -> None:
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])


def _unigram(normalizer: Any, words: Any, byte_fallback: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = words
    trainer = trainers.UnigramTrainer(
        vocab_size=500,
        special_tokens=SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:500] for text in CORPUS[:30]] + SENTENCES, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["model"]["byte_fallback"] = byte_fallback
    trained["added_tokens"] = [
        token for token in trained["added_tokens"] if token["content"] in SPECIAL
    ]
    return Tokenizer.from_str(json.dumps(trained))


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:30], trainer)
    return tokenizer


def _around(single: str) -> Any:
    ids = [(token, token_id) for token_id, token in enumerate(SPECIAL) if token in single]
    return post.TemplateProcessing(single=single, special_tokens=ids)


def _plain(text: str, **settings: bool) -> AddedToken:
    return AddedToken(text, **{"special": False, "normalized": False, **settings})


_MARK = normalizers.Replace(" ", "▁")
_MARKED = normalizers.Sequence([normalizers.Prepend("▁"), _MARK])
_TRIMMED = post.ByteLevel(trim_offsets=False)
_DIGITS = pre.Sequence([pre.Digits(individual_digits=True), _bytes()])

FAST: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt2": _byte_level,
    "gpt2 with a space before": lambda: _byte_level(_bytes(add_prefix_space=True)),
    "gpt-neox": lambda: _byte_level(
        normalizer=normalizers.NFC(),
        added=(_plain("  ", normalized=True), _plain("    ", normalized=True)),
    ),
    "llama 3": lambda: _byte_level(
        _by(LLAMA_3), around=post.Sequence([_TRIMMED, _around("<s> $A")]), ignore_merges=True
    ),
    "qwen 2": lambda: _byte_level(
        _by(QWEN), normalizers.NFC(), _TRIMMED, (_plain("<tool_call>"), _plain("<think>"))
    ),
    "qwen 3.5": lambda: _byte_level(_by(QWEN_3_5), normalizers.NFC(), _TRIMMED),
    "cl100k": lambda: _byte_level(
        pre.Sequence([pre.Split(Regex(LLAMA_3), "removed", invert=True), _bytes(use_regex=False)])
    ),
    "o200k": lambda: _byte_level(_by(O200K)),
    "tekken": lambda: _byte_level(_by(TEKKEN), around=_around("<s> $A"), ignore_merges=True),
    "kimi": lambda: _byte_level(_by(KIMI)),
    "deepseek": lambda: _byte_level(
        _by(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK),
        normalizers.Sequence([]),
        _around("<s> $A"),
        (AddedToken("<｜User｜>", normalized=False, special=False),),
    ),
    "starcoder": lambda: _byte_level(_DIGITS),
    "command r": lambda: _byte_level(_DIGITS, normalizers.NFC(), _around("<s> $A </s>")),
    "marks with spaces": lambda: _byte_level(
        added=(
            AddedToken("<one>", single_word=True, special=True),
            AddedToken("<both>", lstrip=True, rstrip=True, special=True),
            AddedToken("<left>", lstrip=True, special=True),
        )
    ),
    "llama 2": lambda: _sentence_piece(_MARKED),
    "gemma": lambda: _sentence_piece(_MARK, pre.Split(" ", "merged_with_previous")),
    "phi 3": lambda: _sentence_piece(
        _MARKED,
        added=(
            AddedToken("<|user|>", rstrip=True, special=True, normalized=False),
            AddedToken("<|end|>", rstrip=True, special=True, normalized=False),
            _plain("<n>", normalized=True),
        ),
    ),
}
"""Kinds that fastokens serves."""

EXACT: Mapping[str, Callable[[], Tokenizer]] = {
    "mistral v3": lambda: _sentence_piece(words=pre.Metaspace(prepend_scheme="first", split=False)),
    "tiny llama": lambda: _sentence_piece(words=pre.Metaspace(prepend_scheme="always")),
    "falcon": lambda: _byte_level(
        pre.Sequence([pre.Punctuation("contiguous"), _bytes(), _split("[0-9][0-9][0-9]")])
    ),
    "nfkc": lambda: _byte_level(_by(QWEN), normalizers.NFKC()),
    "lower case": lambda: _byte_level(
        normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "unigram": lambda: _unigram(normalizers.NFKC(), pre.Metaspace(), byte_fallback=False),
    "unigram with bytes": lambda: _unigram(
        normalizers.Sequence([]), pre.Metaspace(prepend_scheme="first", split=False), True
    ),
    "word piece": _word_piece,
}
"""Kinds that are left to `tokenizers`."""
