"""Which keys of a checkpoint's config.json are those of its decoder.

Tests: tests/unit/core/test_decoder_keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

GEMMA3_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    }
)
"""What published files of Gemma 3 leave out where they mean it."""


def decoder_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a config.json; a model that also sees pictures has its decoder's deeper.

    What such a file says for the whole model counts for its decoder.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    usual = GEMMA3_DEFAULTS if inner.get("model_type") == "gemma3_text" else {}
    whole = {key: value for key, value in config.items() if value is not None}
    return {**usual, **inner, **whole}
