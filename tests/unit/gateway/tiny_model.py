"""A model folder without weights: a byte-level tokenizer and a chat template, made in the test."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = 1
TEXT = """the mesh moves blocks from prefill to decode and the stream goes on
one request, one reservation, one handoff; no token is lost or repeated
"""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant\\n' }}
{%- endif %}
"""


TOOL_TEMPLATE = (
    """\
{%- for tool in tools or [] %}{{ '<tool_call>' + tool.function.name + '\\n' }}{%- endfor %}
"""
    + CHAT_TEMPLATE
)


CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


def make_tokenizer() -> Tokenizer:
    """All 256 bytes are tokens, so any text can be said, also in parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    assert tokenizer.token_to_id("<|end|>") == EOS
    return tokenizer


def write_model(folder: Path) -> Tokenizer:
    """Writes the folder's files and returns the tokenizer."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "top_k": 7, "eos_token_id": EOS})
    )
    return tokenizer
