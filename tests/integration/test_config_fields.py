"""Every field of a family's config is computed as transformers computes it, or refused by name."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import load_model_config, parse_model_config
from kvmesh.engine.families import FAMILIES
from kvmesh.engine.runner import TorchRunner
from tests.integration.families import BLOCK_SIZE, NUM_BLOCKS, random_model
from tests.integration.families import prompt_logprobs as transformers_logprobs
from tests.integration.family_configs import CONFIGS
from tests.integration.family_shapes import VOCAB_SIZE
from tests.integration.test_transformers_equality import prompt_logprobs

PROMPT = [(37 * position * position + 11) % VOCAB_SIZE for position in range(64)]
"""Longer than the windows of the configs."""

FLIPPED = (
    "_remove_final_layer_norm",
    "add_cross_attention",
    "alibi",
    "attention_bias",
    "attention_k_eq_v",
    "mamba_norm_before_gate",
    "mamba_rms_norm",
    "attention_out_bias",
    "bias",
    "block_auto_adjust_ff_dim",
    "conv_bias",
    "do_layer_norm_before",
    "enable_bias",
    "enable_moe_block",
    "kda_safe_gate",
    "layer_norm_elementwise_affine",
    "linear_allow_neg_eigval",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mlp_bias",
    "multi_query",
    "mup_enabled",
    "new_decoder_architecture",
    "norm_topk_prob",
    "parallel_attn",
    "qkv_bias",
    "residual_in_fp32",
    "rope_interleave",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
    "use_conv_bias",
    "use_double_wide_mlp",
    "use_post_norm",
    "use_bias",
    "use_attention_gate",
    "use_bidirectional_attention",
    "use_expert_bias",
    "qk_layernorm",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
    "use_sandwich_norm",
    "use_sliding_window",
)
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.75},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **STRETCHED},
    {"rope_type": "yarn", "attention_factor": 1.5, "beta_fast": 16.0, **STRETCHED},
    {"rope_type": "longrope", **LONG, **STRETCHED},
)
ODD: dict[str, tuple[Any, ...]] = {
    "activation": ("relu",),
    "activation_function": ("silu",),
    "attention_in_multiplier": (0.5,),
    "attention_multiplier": (0.5,),
    "attention_out_multiplier": (0.5,),
    "attn_layer_indices": ([0, 2], [0, 1, 2], None),
    "attn_logit_softcapping": (1.0,),
    "block_ffn_dim_multiplier": (0.5,),
    "block_multiple_of": (64,),
    "clip_qkv": (0.1,),
    "conv_L_cache": (1, 2),
    "conv_kernel": (2,),
    "decoder_sparse_step": (2, 0, 0.5),
    "embedding_multiplier": (0.25,),
    "final_logit_softcapping": (1.0,),
    "first_k_dense_replace": (0, 2),
    "full_attn_alpha_factor": (2.0,),
    "head_dim": (8,),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("gelu", "silu"),
    "hidden_size_per_layer_input": (8,),
    "kda_lower_bound": (-0.5,),
    "key_multiplier": (0.5,),
    "kv_lora_rank": (48,),
    "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 3),
    "linear_conv_kernel_dim": (2,),
    "layer_norm_eps": (0.3,),
    "layer_norm_epsilon": (0.3,),
    "lm_head_multiplier": (2.0,),
    "logit_scale": (2.0,),
    "logits_scaling": (0.5,),
    "mamba_d_conv": (2,),
    "mamba_d_head": ("auto",),
    "mamba_d_ssm": (48, None),
    "mamba_d_state": (8,),
    "mamba_head_dim": (8,),
    "mamba_hidden_act": ("gelu",),
    "mamba_n_groups": (1,),
    "mamba_num_heads": (4, 5),
    "mlp_layer_types": (["sparse", "dense", "sparse"],),
    "mlp_hidden_act": ("silu",),
    "mlp_multipliers": ([0.5, 2.0], None, [1.0]),
    "mlp_only_layers": ([0, 2], ["1"], 1),
    "moe_intermediate_size": (24,),
    "moe_layer_end_index": (1, 7),
    "moe_layer_interval": (2, 0),
    "moe_latent_size": (24, None),
    "moe_layer_start_index": (0, 2),
    "moe_norm_min": (0.9,),
    "moe_num_shared_experts": (0, 1),
    "moe_shared_expert_intermediate_size": (24,),
    "n_group": (1, 3),
    "n_groups": (1,),
    "n_inner": (24, None),
    "n_shared_experts": (1,),
    "no_rope_layer_interval": (3,),
    "norm_eps": (0.3,),
    "norm_epsilon": (0.3,),
    "no_rope_layers": ([0, 1, 1], [0]),
    "num_dense_layers": (0, 2),
    "num_experts_per_tok": (1, 100),
    "num_key_value_heads": (3,),
    "num_kv_heads": (3, 4),
    "num_kv_shared_layers": (0, 4),
    "num_ln_in_parallel_attn": (1, 2, 3),
    "num_shared_experts": (0, 1),
    "original_max_position_embeddings": (32, 4096),
    "position_embedding_type": ("rope", None, "nope"),
    "q_lora_rank": (24, None),
    "query_pre_attn_scalar": (7,),
    "residual_multiplier": (0.5,),
    "rms_norm_eps": (0.3,),
    "rope_parameters": tuple({"rope_theta": 300.0, **table} for table in ROPES),
    "rotary_dim": (8, 20, None),
    "route_scale": (3.0,),
    "routed_scaling_factor": (3.0,),
    "router_scaling_factor": (3.0,),
    "shared_intermediate_size": (24, 0),
    "sliding_window": (8, None),
    "ssm_in_multiplier": (0.5,),
    "ssm_multipliers": ([0.5, 2.0, 0.7, 1.5, 3.0], None, [1.0]),
    "ssm_out_multiplier": (0.5,),
    "ssm_state_size": (8,),
    "swiglu_alpha": (1.0,),
    "swiglu_limit": (0.5,),
    "time_step_limit": ([0.01, 0.1],),
    "top_k_experts": (1,),
    "topk_group": (1, 100),
    "topk_method": ("greedy", "noaux_tc"),
    "vocab_size_per_layer_input": (100, 400),
    "word_embed_proj_dim": (48,),
}
# What a message says of a field whose own name is not all of it.
NAMED = {
    "num_shared_experts": "shared_experts",
    "mamba_d_ssm": "mamba_d_ssm|mamba_d_head",
    "mamba_norm_before_gate": "mamba_norm_before_gate",
    "mamba_rms_norm": "mamba_norm_before_gate",
    "enable_moe_block": "num_experts",
    "rope_parameters": "rope_parameters|rope_type|partial_rotary_factor",
    "layer_types": "layer.types?|without an attention layer",
    "n_group": "n_group|topk_group",
    "sliding_window": "sliding_window|layer type sliding",
    "use_sliding_window": "use_sliding_window|sliding_window",
}


def odd_values() -> Iterator[Any]:
    for family, config in CONFIGS.items():
        usual = config.to_dict()
        # The size of heads follows from others where latents are kept.
        derived = {"head_dim"} if "kv_lora_rank" in usual else set()
        for field in sorted(usual.keys() & {*FLIPPED, *ODD} - derived):
            values = ODD.get(field, (not usual[field],))
            for value in values:
                yield pytest.param(family, field, value, id=f"{family}-{field}-{label(value)}")
    # Two fields that mean something together only.
    for family in ("qwen2-tied", "qwen3-untied", "qwen2-moe", "qwen3-moe-one-dense-layer"):
        changes = {"sliding_window": 8, "max_window_layers": 1, "layer_types": None}
        yield pytest.param(family, "use_sliding_window", changes, id=f"{family}-windows")
    changes = {"sliding_window": 8, "layer_types": None, "no_rope_layers": None}
    yield pytest.param("smollm3", "use_sliding_window", changes, id="smollm3-windows")


def spread() -> Iterator[Any]:
    """Each value of each field in one family, and some of each family; the rest are long tests."""
    cases = list(odd_values())
    same: dict[tuple[str, str], list[int]] = {}
    for number, case in enumerate(cases):
        _, field, value = case.values
        same.setdefault((field, repr(value)), []).append(number)
    chosen: dict[str, list[int]] = {family: [] for family in CONFIGS}
    for numbers in sorted(same.values(), key=len):  # those of few families have no choice
        families = {cases[number].values[0]: number for number in reversed(numbers)}
        family = min(families, key=lambda name: len(chosen[name]))
        chosen[family].append(families[family])
    for number, case in enumerate(cases):
        family = case.values[0]
        is_long = number not in chosen[family] and bool(chosen[family])
        chosen[family] = chosen[family] or [number]
        yield pytest.param(*case.values, id=case.id, marks=[pytest.mark.long] * is_long)


def label(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return str(value["rope_type"]) + ("-partial" if "partial_rotary_factor" in value else "")


def with_value(family: str, field: str, value: Any) -> dict[str, Any]:
    raw: dict[str, Any] = CONFIGS[family].to_dict()
    if field == "use_sliding_window" and isinstance(value, dict):
        return raw | value | {field: True}
    return raw | {field: value}


def refusal_of(folder: Path) -> str | None:
    try:
        load_model_config(folder)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("family", "field", "value"), list(spread()))
def test_an_odd_value_is_computed_or_refused(
    family: str, field: str, value: Any, tmp_path: Path
) -> None:
    raw = with_value(family, field, value)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if (refusal := refusal_of(tmp_path)) is not None:
        assert re.search(NAMED.get(field, field), refusal), refusal
        return
    model = random_model(type(CONFIGS[family]).from_dict(raw))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    runner = TorchRunner.load(
        tmp_path, served_name="odd", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=128
    )
    found, wanted = prompt_logprobs(runner, PROMPT), transformers_logprobs(model, PROMPT)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3)


def written_otherwise(table: dict[str, Any]) -> Any:
    """The number that transformers writes as an object, or what is one."""
    return float(table["__float__"]) if "__float__" in table else table


# A wrong number does not fit the tensors, or is not the architecture's.
FITTING = {"head_dim", "intermediate_size", "num_key_value_heads", "eos_token_id", "dtype"}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_missing_key_means_what_transformers_takes_for_it(family: str) -> None:
    text = CONFIGS[family].to_json_string(use_diff=False)
    whole = json.loads(text, object_hook=written_otherwise)
    usual_names = dict(FAMILIES[whole["model_type"]].aliases)
    found = []
    for key in sorted(whole.keys() - FITTING):
        raw = {name: value for name, value in whole.items() if name != key}
        try:
            parsed = parse_model_config(raw, {}, origin="")
        except CheckpointError as error:
            if usual_names.get(key, key) not in str(error):
                found.append(f"{key}: {error}")
            continue
        try:
            theirs = type(CONFIGS[family]).from_dict(raw).to_dict()
        except StrictDataclassClassValidationError:
            continue  # what it takes does not go with the other fields of the test
        if parsed != parse_model_config(theirs, {}, origin=""):
            found.append(f"{key}: read as something else than {theirs.get(key)!r}")
    assert not found


STRANGE: tuple[Any, ...] = (
    "x",
    [],
    {},
    -1,
    0.5,
    True,
    [None],
    {"a": [1]},
    float("nan"),
    10**400,
    {"rope_type": []},
)
OLDER = ("linear_attn_config", "max_window_layers", "rope_scaling", "rotary_dim", "torch_dtype")


@pytest.mark.parametrize("family", CONFIGS)
def test_what_is_no_value_of_a_field_ends_in_no_other_error(family: str) -> None:
    whole = CONFIGS[family].to_dict()
    for key in {*whole, *OLDER}:
        # These win over what older files have.
        newer = {"rope_scaling": ["rope_parameters"], "linear_attn_config": ["layer_types"]}
        usual = {name: whole[name] for name in whole if name not in newer.get(key, [])}
        for value in STRANGE:
            with contextlib.suppress(CheckpointError):
                parse_model_config(usual | {key: value}, {}, origin="")
