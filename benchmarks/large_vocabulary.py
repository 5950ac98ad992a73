"""A tokenizer with the vocabulary of a published model, for benchmarks of fronts.

The embedded model knows 4,096 tokens, so a chat has several times as many of them as it has in the
vocabulary of a model that people serve. The file is `tekken_240911.json` of Mistral NeMo, which the
package mistral_common has in its folder `data`. Tests: tests/unit/benchmarks/test_vocabulary.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.text.tokenizer import byte_level_table


def write_tokenizer(tekken: Path, specials: Sequence[str], file: Path) -> int:
    """Writes a `tokenizer.json`; returns the number of its tokens.

    Tokens that are no text of their own get the last ids: workers of the benchmarks answer with ids
    of a range, and fronts hold text back until its last character is complete.

    Args:
        tekken: vocabulary as mistral_common stores it.
        specials: control tokens; they get the first ids.
    """
    read = json.loads(tekken.read_text())
    config = read["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    words = [base64.b64decode(entry["token_bytes"]) for entry in read["vocab"][:count]]
    names = {byte: name for name, byte in byte_level_table().items()}
    written = ["".join(names[byte] for byte in word) for word in words]
    in_order = sorted(range(count), key=lambda rank: not _is_text(words[rank]))
    names_in_order = (*specials, *(written[rank] for rank in in_order))
    vocab = {name: number for number, name in enumerate(names_in_order)}
    merges = _merges(words)
    model = models.BPE(vocab, [(written[a], written[b]) for a, b in merges], ignore_merges=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    made.save(str(file))
    return len(vocab)


def _is_text(word: bytes) -> bool:
    try:
        word.decode()
    except UnicodeDecodeError:
        return False
    return True


def _merges(words: Sequence[bytes]) -> list[tuple[int, int]]:
    """Pairs of words that make another one: in the order of that, then of the pairs."""
    ranks = {word: rank for rank, word in enumerate(words)}
    found: list[tuple[int, int]] = []
    for word in words:
        cuts = ((word[:at], word[at:]) for at in range(1, len(word)))
        found += sorted((ranks[a], ranks[b]) for a, b in cuts if a in ranks and b in ranks)
    return found
