"""A vocabulary as mistral_common stores it, as a tokenizer of a checkpoint."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tokenizers

from benchmarks.large_vocabulary import write_tokenizer
from benchmarks.our_mesh import model_folder
from services.gateway.text.tokenizer import load_tokenizer

WORDS = ("th", "he", " t", "the", " the", "é", "12")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def stored(folder: Path) -> Path:
    """All bytes, some words, and more of them than the model has."""
    words = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"unused"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    config = {
        "pattern": PATTERN,
        "default_vocab_size": 256 + len(WORDS) + 1000,
        "default_num_special_tokens": 1000,
    }
    file = folder / "tekken.json"
    file.write_text(json.dumps({"config": config, "vocab": entries}))
    return file


def test_words_are_made_of_shorter_ones_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    assert write_tokenizer(stored(tmp_path), ("<s>", "</s>"), file) == 2 + 256 + len(WORDS)
    made = tokenizers.Tokenizer.from_file(str(file))
    assert made.encode("<s>the the</s>").ids == [0, 2 + 128 + 3, 2 + 128 + 4, 1]
    assert made.encode("12").ids == [2 + 49, 2 + 50], "digits stand alone in the pattern"
    whole = [made.decode([number]) for number in range(2, 2 + 128 + len(WORDS))]
    assert whole[128:] == list(WORDS), "bytes that are no text come last"
    text = "thé the\nthere 12 😀"
    assert made.decode(made.encode(text).ids) == text


async def test_a_gateway_reads_a_checkpoint_with_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, stored(tmp_path))
    tokenizer = load_tokenizer(folder)
    text = "the other thé 12"
    token_ids = await tokenizer.encode(text, add_special_tokens=True)
    assert await tokenizer.decode(token_ids) == text
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == 4 + 256 + len(WORDS)
