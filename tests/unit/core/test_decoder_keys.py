from __future__ import annotations

from typing import Any

from kvmesh.core.decoder_keys import decoder_keys


def test_keys_that_lie_open_are_the_decoders() -> None:
    config = {"model_type": "llama", "hidden_size": 8}
    assert decoder_keys(config) == config


def test_what_is_said_for_the_whole_model_counts_for_its_decoder() -> None:
    inner = {"model_type": "mistral", "hidden_size": 8, "tie_word_embeddings": True}
    whole: dict[str, Any] = {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    found = decoder_keys({**whole, "text_config": inner})
    assert (found["model_type"], found["hidden_size"]) == ("mistral3", 8)
    assert found["tie_word_embeddings"] is False
    assert "eos_token_id" not in found


def test_what_gemma3_leaves_out() -> None:
    inner = {"model_type": "gemma3_text", "num_attention_heads": 16}
    found = decoder_keys({"model_type": "gemma3", "text_config": inner})
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (16, 4)
