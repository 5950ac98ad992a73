"""Tiny configs of families with layers that carry a state, see family_configs.py."""

from __future__ import annotations

from typing import Any

from transformers import (
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.integration.family_shapes import (
    BAILING_OTHER_KEYS,
    CONVOLUTIONS,
    DELTA,
    FALCON_H1,
    GRANITE,
    KIMI_KEYS,
    LATENT,
    LINEAR_FIRST,
    NEMOTRON_H,
    SHAPE,
)

HYBRIDS: dict[str, Any] = {
    "qwen3-next": Qwen3NextConfig(
        **(SHAPE | DELTA | {"head_dim": 32, "num_hidden_layers": 5}),
        layer_types=[
            "linear_attention",
            "linear_attention",
            "full_attention",
            "linear_attention",
            "full_attention",
        ],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.25,
        },
        linear_conv_kernel_dim=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "qwen3.5": Qwen3_5TextConfig(
        # Values of a multiple of what the compiled library reads at once; the other two have none.
        **(SHAPE | DELTA | {"head_dim": 32, "linear_value_head_dim": 32}),
        layer_types=LINEAR_FIRST,
        tie_word_embeddings=True,
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **({key: value for key, value in SHAPE.items() if key != "intermediate_size"} | DELTA),
        layer_types=LINEAR_FIRST,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
    ),
    "kimi-linear": KimiLinearConfig(
        **({key: value for key, value in LATENT.items() if key in KIMI_KEYS} | {"pad_token_id": 0}),
        num_local_experts=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_heads=3,
        linear_head_dim=16,
        linear_conv_kernel_dim=3,
        tie_word_embeddings=True,  # it has no effect
    ),
    "bailing-hybrid": BailingHybridConfig(
        **{key: value for key, value in LATENT.items() if key not in BAILING_OTHER_KEYS},
        pad_token_id=0,
        head_dim=LATENT["qk_rope_head_dim"],
        num_local_experts=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_mtp_layers=0,
        tie_word_embeddings=True,  # as above
    ),
    "minimax": MiniMaxConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=5,
        num_experts_per_tok=2,
        linear_attn_alpha_factor=1.5,
        linear_attn_beta_factor=0.5,
        full_attn_alpha_factor=0.75,
        mlp_alpha_factor=1.25,
        mlp_beta_factor=2.0,
        block_size=32,
    ),
    "lfm2": Lfm2Config(
        **SHAPE, layer_types=CONVOLUTIONS, block_multiple_of=16, block_ffn_dim_multiplier=0.8
    ),
    "lfm2-moe": Lfm2MoeConfig(
        **SHAPE,
        layer_types=CONVOLUTIONS,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        routed_scaling_factor=1.5,
    ),
    "lfm3": Lfm3Config(
        **(SHAPE | {"num_hidden_layers": 4}),
        layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        sliding_window=40,
        pad_token_id=0,
        bos_token_id=None,
        attention_bias=True,
    ),
    "granite4-hybrid": GraniteMoeHybridConfig(
        **GRANITE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
    ),
    "olmo-hybrid": OlmoHybridConfig(
        **(SHAPE | DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
        layer_types=LINEAR_FIRST,
        pad_token_id=0,
        bos_token_id=None,
    ),
    "olmo-hybrid-rotated": OlmoHybridConfig(
        **(SHAPE | DELTA),
        layer_types=LINEAR_FIRST,
        pad_token_id=0,
        bos_token_id=None,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "bamba": BambaConfig(
        **SHAPE,
        attn_layer_indices=[1],
        pad_token_id=0,
        bos_token_id=None,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=24,
    ),
    "falcon-h1": FalconH1Config(**FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False),
    "falcon-h1-scaled": FalconH1Config(
        **FALCON_H1,
        lm_head_multiplier=0.5,
        embedding_multiplier=3.0,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.6,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.4,
        mlp_multipliers=[0.8, 0.3],
        ssm_multipliers=[0.6, 0.9, 1.4, 0.7, 1.1],
    ),
    "nemotron-h": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    ),
    "nemotron-h-latent": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["full_attention", "mlp", "linear_attention", "moe"],
        moe_latent_size=36,
    ),
}
