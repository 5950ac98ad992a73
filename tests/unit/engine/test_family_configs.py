"""What families make of keys as published checkpoints have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.checkpoint import parse_model_config
from kvmesh.engine.config import (
    HeadShape,
    LatentConfig,
    LinearConfig,
    ModelConfig,
    RopeConfig,
)
from kvmesh.engine.models.bailing_hybrid import _Projection
from kvmesh.kernels.linear import Linear
from tests.unit.engine.tiny_checkpoint import CONFIG

KIMI: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 72,
    "model_max_length": 512,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 8,
        "num_heads": 2,
        "short_conv_kernel_size": 3,
    },
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 16,
    "moe_renormalize": False,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 2,
    "topk_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.0,
}


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(raw | changes, {}, origin="config.json")


def test_kimi_linear() -> None:
    config = parse(KIMI)
    assert config.max_position_embeddings == 512
    assert config.linear == LinearConfig(frozenset({0, 1, 3}), 2, 2, 8, 8, 3)
    assert config.latent == LatentConfig(0, 16, 4, 8, 8, interleaved=False)
    assert config.attention_scale == 12**-0.5
    moe = config.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.num_groups, moe.top_groups) == (8, 3, 2, 1)
    assert (moe.sparse_layers, moe.shared_size) == (frozenset({2, 3}), 32)
    assert (moe.normalize, moe.scale, moe.biased_choice) == (False, 2.0, True)


def test_layers_of_kimi_linear_that_the_file_does_not_name() -> None:
    config = parse(KIMI, linear_attn_config=None, num_hidden_layers=6)
    assert config.linear == LinearConfig(frozenset({0, 1, 2, 3, 5}), 32, 32, 128, 128, 4)


BAILING: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "layer_group_size": 3,
    "kda_lower_bound": -4.0,
}


def test_bailing_hybrid() -> None:
    config = parse(BAILING)
    assert config.linear == LinearConfig(frozenset({0, 1, 3, 4}), 4, 4, 16, 16, 4)
    assert (config.head_dim, config.rope.theta) == (4, 6e6)
    assert config.moe is not None
    assert config.moe.sparse_layers == frozenset({2, 3, 4})
    assert config.decay_bound == -4.0
    assert parse(BAILING, kda_safe_gate=False).decay_bound == 0.0


def test_families_whose_head_is_never_tied() -> None:
    for raw in (KIMI, BAILING):
        assert not parse(raw, tie_word_embeddings=True).tie_word_embeddings


@pytest.mark.parametrize("bound", [-0.5, 0.0])
def test_decays_of_bailing_hybrid(bound: float) -> None:
    shape = LinearConfig(frozenset({0}), 2, 2, 3, 3, 1)
    weight = torch.arange(2.0 * 32).view(32, 2) / 10 - 3
    rate, bias = torch.tensor([[0.5], [2.0]]), torch.full((2, 3), 0.25)
    project = _Projection(Linear(weight, None, packed=False), rate, bias, bound, shape)
    h = torch.tensor([[1.0, -0.5]])
    time = (h @ weight.T)[:, 20:26].view(1, 2, 3) + 0.25
    wanted = bound * torch.sigmoid(rate * time) if bound else -rate * torch.log1p(time.exp())
    torch.testing.assert_close(project(h).decay, wanted)


def test_minimax() -> None:
    factors = {"linear_attn_alpha_factor": 3.5, "mlp_beta_factor": 2}
    config = parse(CONFIG | factors, model_type="minimax", num_hidden_layers=3, sliding_window=8)
    assert config.linear is not None
    assert config.linear.layers == frozenset({1})
    assert config.linear.state_values == config.num_heads * config.head_dim**2
    assert config.residual_factors == ((1.0, 1.0), (3.5, 1.0), (1.0, 2.0))
    assert config.windows == (8, 8, 8)


def test_keys_of_a_seeing_model_lie_deeper() -> None:
    text = CONFIG | {"model_type": "qwen3_5_text", "tie_word_embeddings": True, "eos_token_id": 5}
    text["num_hidden_layers"] = 4
    whole = {"tie_word_embeddings": False, "eos_token_id": None, "text_config": text}
    config = parse(whole, model_type="qwen3_5")
    assert (config.family, config.tie_word_embeddings) == ("qwen3_5", False)
    assert config.eos_token_ids == frozenset({5})
    assert config.hidden_size == CONFIG["hidden_size"]


@pytest.mark.parametrize("said", [{}, {"original_max_position_embeddings": 128}])
def test_the_original_length_of_phi3_lies_beside_its_rope(said: dict[str, int]) -> None:
    long_rope = {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    shares = {"partial_rotary_factor": 0.75, "max_position_embeddings": 131072}
    config = parse(CONFIG | shares, model_type="phi3", rope_scaling=long_rope, **said)
    assert config.rotary_dim == 6
    assert config.rope.original_max_positions == said.get("original_max_position_embeddings", 4096)
    inner = long_rope | {"original_max_position_embeddings": 64}
    other = parse(CONFIG | shares, model_type="phi3", rope_scaling=inner, **said)
    assert other.rope == config.rope


def test_older_files_of_granite_4_call_layers_otherwise() -> None:
    none = {"num_local_experts": 0, "num_experts_per_tok": 0}
    usual = CONFIG | none | {"model_type": "granitemoehybrid", "mamba_n_heads": 4}
    newer = parse(usual, layer_types=["full_attention", "linear_attention"])
    assert parse(usual, layer_types=["attention", "mamba"]) == newer
    assert parse(usual, layers_block_type=["attention", "mamba"]) == newer
    assert newer.linear == LinearConfig(frozenset({1}), 1, 4, 256, 16, 4)


def test_older_names_of_lfm2() -> None:
    newer = parse(
        CONFIG,
        model_type="lfm2",
        intermediate_size=600,
        layer_types=["conv", "full_attention"],
        tie_word_embeddings=False,
    )
    older = {"block_ff_dim": 600, "full_attn_idxs": [1], "tie_embedding": False}
    assert parse(CONFIG | older, model_type="lfm2") == newer
    # Two thirds, and then the next multiple of 256.
    assert newer.intermediate_size == 512
    assert newer.linear == LinearConfig(frozenset({0}), 0, 1, 0, 32, 3)
    assert newer.state_values == 2 * 32


def test_older_names_of_the_rope_of_gpt_neox() -> None:
    usual = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    usual |= {"model_type": "gpt_neox", "num_key_value_heads": None, "hidden_act": "gelu"}
    newer = parse(usual, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    assert parse(usual, rotary_emb_base=500.0, rotary_pct=0.5) == newer
    assert (newer.rotary_dim, newer.rope.theta) == (4, 500.0)
    assert parse(usual).rotary_dim == 2


def test_hunyuan_says_how_many_experts_a_row_takes_for_each_layer() -> None:
    sizes = {"model_type": "hunyuan_v1_moe", "num_experts": 8}
    for said in (3, [3, 3]):
        config = parse(CONFIG | sizes, moe_topk=said)
        assert config.moe is not None
        assert config.moe.top_k == 3
    for wrong in ([2, 3], [], ["x", "x"]):
        with pytest.raises(CheckpointError, match="moe_topk"):
            parse(CONFIG | sizes, moe_topk=wrong)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_alpha_of_hunyuan_stretches_the_base_of_its_own_kind(kind: str) -> None:
    table = {"type": kind, "alpha": 1000.0, "factor": 1.0}
    config = parse(CONFIG, model_type="hunyuan_v1_dense", rope_scaling=table)
    stretch = 1000.0 ** (8 / 6) if kind == "dynamic" else 1
    assert config.rope.theta == pytest.approx(10000.0 * stretch)


@pytest.mark.parametrize("names", [{"hidden_act": "gelu"}, {"hidden_activation": None}])
def test_older_names_of_gemmas_activation(names: dict[str, str | None]) -> None:
    usual = {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    assert parse(CONFIG | usual, **names) == parse(CONFIG | usual)


GEMMA4: dict[str, Any] = CONFIG | {
    "model_type": "gemma4_text",
    "hidden_act": None,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "rope_theta": None,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
}


def test_gemma4() -> None:
    config = parse(GEMMA4)
    assert config.windows == (512,) * 5 + (0, 0)
    assert (config.full_heads, config.full_keys_as_values) == (HeadShape(1, 32), True)
    assert (config.rope.kind, config.rope.share, config.rope.theta) == ("proportional", 0.25, 1e6)
    assert config.local_rope == RopeConfig(10000.0)
    assert (config.attention_scale, config.kv_sources) == (1.0, ())


@pytest.mark.parametrize("said", [None, 1])
def test_heads_of_gemma4_that_are_one_key_for_all(said: int | None) -> None:
    # Those of E2B and E4B have this key and no use for it.
    config = parse(GEMMA4, num_global_key_value_heads=said, attention_k_eq_v=False)
    assert config.full_heads == HeadShape(config.num_kv_heads, 32)


def test_newer_files_of_gemma4_say_heads_layer_by_layer() -> None:
    own = {"head_dim": 32, "num_key_value_heads": 1}
    older = {"global_head_dim": None, "num_global_key_value_heads": None}
    newer = parse(GEMMA4 | older, per_layer_config={"5": own, "6": own})
    assert newer == parse(GEMMA4)


def test_the_last_layers_of_gemma4_read_those_of_the_last_of_their_kind() -> None:
    types = ["sliding_attention", "full_attention"] * 3 + ["full_attention"]
    config = parse(GEMMA4, layer_types=types, num_kv_shared_layers=3)
    assert config.kv_sources == (0, 1, 2, 3, 2, 3, 3)


NEMOTRON_H = {key: value for key, value in CONFIG.items() if key != "hidden_act"} | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*EM-",
    "num_hidden_layers": 7,
    "n_groups": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "mlp_hidden_act": "relu2",
    "rope_theta": 10000,
    "time_step_limit": [0.0, float("inf")],
}


def test_layers_of_nemotron_h_by_letters() -> None:
    config = parse(NEMOTRON_H)
    assert config.mlp_only == frozenset({1, 4, 6})
    assert config.linear == LinearConfig(frozenset({0, 2, 5}), 2, 4, 8, 12, 4)
    assert config.moe is not None
    assert config.moe.sparse_layers == frozenset({1, 4})
    assert [config.has_attention(layer) for layer in range(7)] == [False] * 3 + [True] + [False] * 3
    types = ["mamba", "moe", "mamba", "attention", "moe", "mamba", "mlp"]
    named = {"hybrid_override_pattern": None, "num_hidden_layers": None}
    assert parse(NEMOTRON_H | named, layers_block_type=types) == config


def test_a_list_of_layers_of_nemotron_h_wins_over_letters() -> None:
    config = parse(NEMOTRON_H, layers_block_type=["full_attention", "mlp"])
    assert (config.num_layers, config.linear, config.moe) == (2, None, None)


def test_factors_of_falcon_h1_are_those_of_rows() -> None:
    sizes = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_state": 4}
    factors = {
        "ssm_in_multiplier": 2.0,
        "ssm_multipliers": [1.0, 2.0, 3.0, 4.0, 5.0],
        "attention_in_multiplier": 3.0,
        "key_multiplier": 0.5,
    }
    config = parse(CONFIG | sizes | factors, model_type="falcon_h1")
    found = dict(config.weight_factors)
    assert found["mamba.in_proj.weight"] == ((16, 2.0), (16, 4.0), (4, 6.0), (4, 8.0), (2, 10.0))
    assert found["self_attn.q_proj.weight"] == ((0, 3.0),)
    assert found["self_attn.k_proj.weight"] == ((0, 1.5),)
    assert config.has_attention(0)
    assert config.is_linear(0)


def test_older_falcon_has_one_key_and_newer_falcon_a_norm_for_each_part() -> None:
    usual = CONFIG | {"model_type": "falcon", "num_key_value_heads": None, "num_kv_heads": 4}
    older, newer = parse(usual), parse(usual, new_decoder_architecture=True)
    assert (older.num_kv_heads, older.norm_each) == (1, False)
    assert (newer.num_kv_heads, newer.norm_each) == (4, True)
    assert not parse(usual, new_decoder_architecture=True, num_ln_in_parallel_attn=1).norm_each


DEEPSEEK = CONFIG | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("raw", "changes", "named"),
    [
        (KIMI, {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "sigmoid"),
        (KIMI, {"linear_attn_config": None}, "without an attention layer"),
        (KIMI, {"attention_bias": True}, "attention_bias of latents"),
        (KIMI, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported is 1"),
        (KIMI, {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        (BAILING, {"score_function": "softmax"}, "score_function"),
        (DEEPSEEK, {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK, {"scoring_func": "sigmoid"}, "scoring_func"),
        (CONFIG, {"model_type": "minimax", "rotary_dim": 4}, "rotary_dim"),
        (CONFIG, {"model_type": "minimax_m2", "attn_type_list": [1, 0]}, "attn_type_list"),
        (CONFIG, {"model_type": "cohere", "use_parallel_block": False}, "use_parallel_block"),
        (CONFIG, {"model_type": "phi3", "rope_scaling": YARN}, "rope_type 'yarn'"),
        (CONFIG, {"model_type": "olmo3"}, "rope_theta 10000.0"),
        (
            CONFIG,
            {"model_type": "olmo3", "rope_theta": None, "rope_parameters": YARN},
            "rope_parameters must be those of each layer type",
        ),
        (
            CONFIG,
            {
                "model_type": "olmo3",
                "rope_theta": None,
                "rope_parameters": {"full_attention": YARN | {"truncate": False}},
            },
            "truncate False",
        ),
        (CONFIG, {"model_type": "granitemoehybrid"}, "mamba_d_head 0 do not fit"),
        (
            CONFIG,
            {"model_type": "granitemoehybrid", "mamba_n_heads": 4},
            "without an attention layer",
        ),
        (CONFIG, {"model_type": "qwen3_5"}, "text_config is missing"),
        (CONFIG, {"model_type": "qwen2_vl", "text_config": []}, "text_config is missing"),
        (
            CONFIG,
            {"model_type": "ministral3", "rope_theta": None, "rope_parameters": YARN},
            "rope_parameters without llama_4_scaling_beta",
        ),
        (
            CONFIG,
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            "model_type of text_config 'mistral4'",
        ),
        (CONFIG, {"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate"),
        (
            CONFIG,
            {
                "model_type": "llama",
                "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
            },
            "rope_type proportional is not supported in llama",
        ),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4, {"layer_types": ["full_attention"] * 7}, "layer_types without sliding"),
        (GEMMA4, {"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 of 7"),
        (GEMMA4, {"num_global_key_value_heads": 3}, "num_global_key_value_heads 3 of 4 heads"),
        (
            GEMMA4,
            {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 9},
            "is 9, below",
        ),
        (GEMMA4, {"rope_parameters": {"full_attention": {}}}, "rope_parameters without sliding"),
        (
            GEMMA4,
            {"per_layer_config": {str(layer): {"head_dim": 8} for layer in range(5)}},
            "layer_types has as sliding",
        ),
        (GEMMA4, {"per_layer_config": {"5": {"head_dim": 8}}}, "must be the same"),
        (GEMMA4, {"per_layer_config": {"a": {}}}, "must be objects by layer"),
        (NEMOTRON_H, {"hybrid_override_pattern": "MX*"}, "layer type X is not supported"),
        (NEMOTRON_H, {"hybrid_override_pattern": "MEM"}, "without an attention layer"),
        (NEMOTRON_H, {"n_groups": 3}, "mamba_num_heads 4 and n_groups 3"),
        (NEMOTRON_H, {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
        (CONFIG, {"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before"),
        (
            CONFIG,
            {"model_type": "gptj", "num_key_value_heads": None, "rope_scaling": YARN},
            "rope_parameters are not supported",
        ),
    ],
)
def test_the_unsupported_is_named(raw: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(raw, **changes)
