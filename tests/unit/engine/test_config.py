from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import load_model_config, parse_model_config
from kvmesh.engine.config import ModelConfig, RopeConfig, Rotation
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


LONG_ROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", ["longrope", "su"])
def test_longrope_has_one_embedding_for_each_side_of_the_original_length(name: str) -> None:
    config = parse(rope_scaling=LONG_ROPE | {"type": name}, max_position_embeddings=64 * 8)
    # Three steps of 2, of the six that the original length has.
    scale = pytest.approx((1 + 3 / 6) ** 0.5)
    factors = tuple(LONG_ROPE["short_factor"]), tuple(LONG_ROPE["long_factor"])
    shared: dict[str, Any] = {"original_max_positions": 64, "scale": scale}
    short, long = (RopeConfig(10000.0, "longrope", pair_factors=f, **shared) for f in factors)
    assert [config.for_length(length).rope for length in (1, 64, 65, 512)] == [
        short,
        short,
        long,
        long,
    ]


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({"factor": 1.0}, 1.0), ({"factor": 64.0}, 2**0.5), ({"attention_factor": 1.25}, 1.25)],
)
def test_the_factor_of_longrope_scales_the_table(changes: dict[str, Any], scale: float) -> None:
    assert parse(rope_scaling=LONG_ROPE | changes).rope.scale == pytest.approx(scale)


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
        ({"model_type": "lama"}, "'lama' is not supported; llama and .* would be;"),
        ({"hidden_act": "gelu"}, r"'gelu' \(only 'silu'.* here\)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_the_unsupported_is_named_with_where_the_supported_is(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{named}.*docs/adding-a-model.md lists"):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "axial"}}, "axial.*supported are.*longrope"),
        ({"rope_scaling": {"type": "proportional"}}, "proportional is not supported in llama"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor must be"),
        ({"rope_scaling": LONG_ROPE | {"long_factor": [1.0, 0.0]}}, "long_factor must be positive"),
        ({"rope_scaling": LONG_ROPE | {"long_factor": [2.0] * 3}}, "4 numbers in .* 4 and 3"),
        (
            {"rope_scaling": LONG_ROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be above 1",
        ),
        (
            {"rope_scaling": {"factor": 4}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling contradicts rope_parameters",
        ),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8.*supported are float32"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
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
        ({"model_type": "gpt_oss", "sliding_window": 16, "num_local_experts": 4}, (16, 0)),
    ],
)
def test_windows_per_layer(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    given = CONFIG | changes
    given = {key: given[key] for key in given if key != "hidden_act" or given[key] is not None}
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
        ({"hidden_size": 32.5}, "hidden_size must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": ["linear"]}, "rope_scaling must be an object"),
        ({"layer_types": "full_attention"}, "layer_types must be names"),
        ({"layer_types": [1, 2]}, "layer_types must be names"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1},
            "max_window",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "1 no_rope_layers for 2 layers"),
        ({"model_type": "smollm3", "no_rope_layers": ["1", "1"]}, "no_rope_layers must be"),
    ],
)
def test_malformed_values(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(**changes)


SPARSE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
GROUPED: dict[str, Any] = {
    "model_type": "glm4_moe",
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (SPARSE | {"decoder_sparse_step": 0}, "decoder_sparse_step must be positive"),
        (SPARSE | {"decoder_sparse_step": 0.5}, "decoder_sparse_step must be a whole number"),
        (SPARSE | {"decoder_sparse_step": "1"}, "decoder_sparse_step must be a number"),
        (SPARSE | {"mlp_only_layers": 1}, "mlp_only_layers must be whole numbers"),
        (SPARSE | {"mlp_only_layers": ["1"]}, "mlp_only_layers must be whole numbers"),
        (SPARSE | {"mlp_only_layers": [[1]]}, "mlp_only_layers must be whole numbers"),
        (SPARSE | {"num_experts_per_tok": 7}, "num_experts_per_tok is 7 of 6 experts"),
        (GROUPED | {"n_group": 3}, "n_group is 3 for 8 experts"),
        (GROUPED | {"n_group": 8}, "n_group is 8 for 8 experts"),
        (GROUPED | {"topk_group": 5}, "topk_group is 5 of n_group, 4"),
        (
            GROUPED | {"topk_group": 1},
            "topk_group is 1 of n_group, 4, which .* num_experts_per_tok, 3",
        ),
        (GROUPED | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (GROUPED | {"first_k_dense_replace": "no"}, "first_k_dense_replace"),
        (GROUPED | {"mlp_layer_types": ["sparse"]}, "1 mlp_layer_types for 2 layers"),
    ],
)
def test_impossible_experts_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(**changes)


def test_experts_in_groups() -> None:
    moe = parse(**GROUPED, first_k_dense_replace=0).moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.top_groups) == (8, 3, 4, 2)
    assert moe.sparse_layers == frozenset({0, 1})


def test_the_stream_of_granite_is_kept_in_another_scale() -> None:
    factors: dict[str, Any] = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 8.0,
    }
    config = parse(model_type="granite", rms_norm_eps=1e-6, **factors)
    assert (config.embedding_scale, config.rms_norm_eps) == (24.0, 4e-6)
    assert (config.attention_scale, config.logit_scale) == (0.25, 0.125)


def test_rotations_per_layer() -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 8}
    usual, local, none = Rotation.USUAL, Rotation.LOCAL, Rotation.NONE

    def rotations(**changes: Any) -> list[Rotation]:
        config = parse(**shape, **changes)
        return [config.rotation(layer) for layer in range(4)]

    assert rotations(model_type="smollm3") == [usual, usual, usual, none]
    flags = [0, 1, 1, 0]
    assert rotations(model_type="smollm3", no_rope_layers=flags) == [none, usual, usual, none]
    assert rotations(model_type="exaone4") == [usual, usual, usual, none]
    assert rotations(model_type="olmo3", rope_theta=500000) == [local, local, local, usual]
    assert rotations(model_type="llama") == [usual] * 4


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
