from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import load_model_config, parse_model_config
from kvmesh.engine.config import ModelConfig, RopeConfig
from tests.unit.engine.tiny_checkpoint import CONFIG


def parse(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return parse_model_config(CONFIG | changes, generation or {}, origin="config.json")


def test_old_and_new_keys_mean_the_same() -> None:
    new = {key: value for key, value in CONFIG.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {
        "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert parse_model_config(new, {}, origin="") == parse()


def test_defaults_of_keys_that_may_be_missing() -> None:
    few = {
        key: value
        for key, value in CONFIG.items()
        if key
        in (
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
    }
    config = parse_model_config(few, {}, origin="")
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 8, "float32")
    assert config.rope == RopeConfig(10000.0)
    assert (config.tie_word_embeddings, config.eos_token_ids) == (False, frozenset())


@pytest.mark.parametrize(
    ("family", "qkv_bias", "qk_norm", "head_dim"),
    [("llama", False, False, 8), ("qwen2", True, False, 8), ("qwen3", False, True, 128)],
)
def test_families(family: str, qkv_bias: bool, qk_norm: bool, head_dim: int) -> None:
    config = parse(model_type=family)
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (qkv_bias, qk_norm, head_dim)
    assert not config.output_bias


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_rope_scaling_of_older_files(type_key: str) -> None:
    assert parse(rope_scaling={type_key: "linear", "factor": 4}).rope == RopeConfig(
        10000.0, "linear", 4.0
    )


def test_llama3_rope() -> None:
    table = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert parse(rope_scaling=table).rope == RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [(2, {}, {2}), (2, {"eos_token_id": [3, 4]}, {2, 3, 4}), (None, {"eos_token_id": 5}, {5})],
)
def test_eos_ids_of_both_files(own: int | None, generation: dict[str, Any], ids: set[int]) -> None:
    assert parse(generation, eos_token_id=own).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba2"}, "mamba2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_the_unsupported_is_named_with_what_is_supported(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{named}.*supported are bailing_hybrid, .*, llama"):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope.*supported are"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8.*supported are float32"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, "sliding_window"),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "moe_intermediate_size": 8},
            "use_sliding_window",
        ),
    ],
)
def test_unsupported_parts_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, (16, 16)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0)),
        ({"model_type": "qwen2", "sliding_window": 16}, (0, 0)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (0, 16),
        ),
        (
            {
                "model_type": "gemma3_text",
                "hidden_act": None,
                "sliding_window": 16,
                "sliding_window_pattern": 2,
            },
            (16, 0),
        ),
        ({"model_type": "gpt_oss", "sliding_window": 16, "num_local_experts": 2}, (16, 0)),
    ],
)
def test_windows_per_layer(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    given = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    assert parse_model_config(given, {}, origin="").windows == windows


def test_both_ropes_of_older_gemma_files() -> None:
    config = parse(
        model_type="gemma3_text",
        sliding_window=8,
        rope_theta=1e6,
        rope_local_base_freq=5000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert config.rope == RopeConfig(1e6, "linear", 8.0)
    assert config.local_rope == RopeConfig(5000.0)


def test_published_and_saved_names_of_the_number_of_experts() -> None:
    sizes: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 8,
        "num_experts_per_tok": 2,
    }
    published, saved = parse(**sizes, num_experts=6), parse(**sizes, num_local_experts=6)
    assert published == saved
    assert published.moe is not None
    assert (published.moe.num_experts, published.moe.normalize) == (6, False)
    dense_first = parse(**sizes, num_experts=6, mlp_only_layers=[0])
    assert dense_first.num_parameters < published.num_parameters


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_malformed_values(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(**changes)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        load_model_config(tmp_path)


def test_generation_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert load_model_config(tmp_path).eos_token_ids == {2, 9}
