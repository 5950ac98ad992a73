"""Texts on which two tokenizers are compared before the faster one replaces the other.

They cover the usual mistakes of tokenizer implementations: letters, digits and spaces of all
scripts; composed characters; runs of white space; special tokens and the space around them; invalid
bytes; whole words of the vocabulary. Pure. Tests: tests/unit/gateway/text/test_text_encoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import fastokens
import tokenizers

SAMPLED_TOKENS = 512
"""Number of vocabulary tokens that are encoded again, evenly sampled."""

SAMPLED_SPECIALS = 24
"""Number of added tokens tried from each end of their list; some models have a thousand."""

_SCRIPTS = (
    "The quick brown fox, isn't it? I'VE said they'll, we're; don’t — “so” ‘be’ it…",
    "Straße, Größe, naïve café, Ångström, ﬁne, ǅ ß ẞ ſ İı",
    "Привет, мир! Съешь ещё этих мягких булок. Ӂ Ѡ",
    "Γειά σου Κόσμε, Ὀδυσσεύς; ς Σ",
    "你好，世界！今天天气怎么样？《中文》、。㐀𠀀",
    "こんにちは世界。カタカナ、ひらがな々ー〆 ﾊﾝｶｸ",
    "안녕하세요 세계! 각 각",
    "مرحبا بالعالم! كيف حالك؟ ٣٤٥ ـَّ",
    "שָׁלוֹם עולם",
    "नमस्ते दुनिया १२३ क्षि",
    "สวัสดีชาวโลก ๑๒๓ ກຂ",
    "გამარჯობა Ა Բարեւ ሰላም ᏣᎳᎩ ᚠᚢ ខ្មែរ မြန်မာ བོད ᠮᠣᠩ",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪🏴\U000e0067\U000e007f ❤️ ☃ 😀😀😀",
    "e\u0301 n\u0303 A\u030a \u0301 o\u0323\u0302 \u212b \u2126 \u1e9b\u0323 a\u0345",
)
_SHAPES = (
    *("a", " ", "  ", "\n", "\t", "\r\n", " a", "a ", "  a", " \n", "\n a", "\r", "\0", "\x7f"),
    *(
        "a  b   c    d",
        "\n\n\n",
        " \n \n",
        "\t\tx\t",
        "x \n  y\r\n\r\n z",
        "a\u00a0b\u3000c\u2003 d",
    ),
    *("\u200b\u200d\ufeff\u2060", "\u2028\u2029\u0085\x0b\x0c\x1c\x1f", "\u1680 \u202f\u205f"),
    *("1", "12", "123", "1234", "12345678901234567890", "3.14", "1,000.5", "v1.2", "²½Ⅷ①൴"),
    *(
        "'s'S’s 'll'LL 'Ve ''",
        "O'Reilly D'Souza L'Lama 'Tom 'Dan x'Some",
        "HTTPServer camelCase snake_case SCREAMING A1b2 iOS",
        "x+=1;//--",
    ),
    *("def f(x):\n    return {'a': [x, 1e-3]}\n\n\nclass B(A):\n\tpass\n", "</p>\n<b a='1'>"),
    *("https://example.com/a/b?c=d&e=%20#f", "C:\\new\\table", "a/b\n/c\n", "...\n!!!\r\n?? "),
    *("$€£¥ ±×÷≠ ←→ ∑∫ █▓ ♥ ©®™ ºª µ", "«a» ¿b? ¡c! „d“ 「e」 ‹f›", "\ufffd\ufffd \ufffda"),
    *("\ue000\U000f0000\U0010fffd\ufdd0\uffff", "\U0001d400\U0001d7d8 \U00013000\U0001f9ff"),
    *("a" * 200, "ab" * 90, "=" * 90, "-" * 33 + "\n", " " * 70 + "x", "中" * 40, "😀" * 12),
    *("<0x41>", "▁▁a▁", "Ġ Ċ Ã©", "<unk>", "<s>a</s>", "<|im_start|>", "[INST]", "<pad"),
)


def first_difference(exact: tokenizers.Tokenizer, fast: fastokens.Tokenizer) -> str | None:
    """Returns a text that the two encode differently; None if there is none."""
    texts = list(_texts(exact))
    for special in (False, True):
        for text in texts:
            # These methods release the interpreter's lock. One text at a time: for several texts,
            # fastokens starts a thread per core, and each thread keeps a table of 17 MiB.
            (right,) = exact.encode_batch_fast([text], add_special_tokens=special)
            (ours,) = fast.encode_batch([text], add_special_tokens=special)
            if right.ids != ours.ids:
                return text
    return None


def _texts(exact: tokenizers.Tokenizer) -> Iterator[str]:
    yield ""
    yield from _SCRIPTS
    yield from _SHAPES
    yield " ".join(_SCRIPTS)
    yield "".join(_SHAPES)
    for token in _some_added(exact):
        yield f"{token}a{token} b {token}  {token}\n{token[:-1]} {token}{token}é"
    size = exact.get_vocab_size(with_added_tokens=False)
    words = exact.decode_batch(
        [[token_id] for token_id in range(0, size, max(1, size // SAMPLED_TOKENS))],
        skip_special_tokens=False,
    )
    for start in range(0, len(words), 16):
        yield "".join(words[start : start + 16])
        yield " ".join(words[start : start + 16])


def _some_added(exact: tokenizers.Tokenizer) -> list[str]:
    added = [str(token.content) for token in exact.get_added_tokens_decoder().values()]
    if len(added) <= 2 * SAMPLED_SPECIALS:
        return added
    return added[:SAMPLED_SPECIALS] + added[-SAMPLED_SPECIALS:]
