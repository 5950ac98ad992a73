"""Tiny configs of all families, of sizes at which each family's own part matters."""

from __future__ import annotations

from typing import Any

from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    InternLM3Config,
    IQuestCoderConfig,
    LlamaConfig,
    MellumConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
)

from tests.integration.family_shapes import (
    COHERE,
    DEEPSEEK_SCALES,
    GRANITE,
    GRANITE4,
    HYBRID,
    LATENT,
    LLAMA3_ROPE,
    LONG_ROPE,
    SHAPE,
    VOCAB_SIZE,
    WITHOUT_HEADS,
    YARN_ROPE,
)
from tests.integration.hybrid_configs import HYBRIDS

CONFIGS: dict[str, Any] = {
    "llama-untied-sharded": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama3-rope-biased": LlamaConfig(
        **SHAPE, tie_word_embeddings=True, attention_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2-tied": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3-untied": Qwen3Config(**(SHAPE | {"head_dim": 24}), tie_word_embeddings=False),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=40),
    "phi": PhiConfig(**(SHAPE | {"hidden_size": 96})),
    # Its heads are what the hidden size leaves for each.
    "phi3": Phi3Config(
        **(SHAPE | {"hidden_size": 96}), sliding_window=40, pad_token_id=0, bos_token_id=None
    ),
    # No prompt is longer than the original length, and some are beyond it in test_long_rope.py.
    "phi3-longrope": Phi3Config(
        **(SHAPE | {"hidden_size": 96}),
        pad_token_id=0,
        bos_token_id=None,
        original_max_position_embeddings=4096,
        rope_parameters=LONG_ROPE | {"partial_rotary_factor": 0.75},
    ),
    "seed-oss": SeedOssConfig(**SHAPE, attention_bias=True, attention_out_bias=True),
    "qwen2-moe": Qwen2MoeConfig(
        **SHAPE,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe-one-dense-layer": Qwen3MoeConfig(
        **(SHAPE | {"head_dim": 32, "hidden_size": 64}),
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "gemma": GemmaConfig(**SHAPE, attention_bias=True),
    "gemma2": Gemma2Config(
        **SHAPE,
        layer_types=HYBRID,
        sliding_window=40,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=8.0,
    ),
    "hunyuan": HunYuanDenseV1Config(
        **SHAPE,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 50.0},
    ),
    "hunyuan-moe": HunYuanMoEV1Config(**SHAPE, num_experts=6, moe_topk=2),
    "gemma3": Gemma3TextConfig(
        **SHAPE, layer_types=HYBRID, sliding_window=40, query_pre_attn_scalar=20
    ),
    # The last two read keys and values of the second and the third.
    "gemma4": Gemma4TextConfig(
        **(SHAPE | {"num_hidden_layers": 5, "global_head_dim": 32}),
        layer_types=[*HYBRID, "sliding_attention", "full_attention"],
        sliding_window=40,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB_SIZE + 4,
        final_logit_softcapping=8.0,
    ),
    "gemma4-moe": Gemma4TextConfig(
        **(SHAPE | {"global_head_dim": 64, "num_global_key_value_heads": 1}),
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=40,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=48,
    ),
    "gemma4-unified": Gemma4UnifiedTextConfig(
        **(SHAPE | {"global_head_dim": 32, "num_global_key_value_heads": 1}),
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=40,
        attention_k_eq_v=True,
    ),
    "gpt-oss": GptOssConfig(
        **(SHAPE | {"head_dim": 32}),
        layer_types=HYBRID,
        sliding_window=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=YARN_ROPE,
    ),
    "deepseek-v2": DeepseekV2Config(
        **(LATENT | {"q_lora_rank": None}),
        topk_method="group_limited_greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": DeepseekV3Config(
        **LATENT, routed_scaling_factor=2.5, rope_parameters=YARN_ROPE | DEEPSEEK_SCALES
    ),
    # Vectors of 48 values, a multiple of what the compiled library reads at once.
    "deepseek-v3-halves": DeepseekV3Config(
        **(LATENT | {"qk_rope_head_dim": 16}), rope_interleave=False
    ),
    "granite": GraniteConfig(**GRANITE, attention_bias=True),
    "granite-moe": GraniteMoeConfig(**GRANITE, num_local_experts=5, num_experts_per_tok=2),
    "granite4": GraniteMoeHybridConfig(
        **GRANITE4,
        attention_bias=True,
        position_embedding_type="rope",
        num_local_experts=0,
        shared_intermediate_size=80,
    ),
    "granite4-moe": GraniteMoeHybridConfig(
        **GRANITE4, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=48
    ),
    "granite-moe-shared": GraniteMoeSharedConfig(
        **GRANITE, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=48
    ),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layer_interval=2, pad_token_id=0),
    "olmo2": Olmo2Config(**SHAPE, pad_token_id=0),
    "olmo3": Olmo3Config(
        **SHAPE,
        pad_token_id=0,
        layer_types=HYBRID,
        sliding_window=40,
        rope_parameters={
            "full_attention": YARN_ROPE | {"truncate": True},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # Its heads are what the hidden size leaves for each.
    "olmoe": OlmoeConfig(
        **(SHAPE | {"hidden_size": 96}), pad_token_id=0, num_experts=6, num_experts_per_tok=2
    ),
    "glm": GlmConfig(**SHAPE, pad_token_id=0),
    "glm4": Glm4Config(**SHAPE, pad_token_id=0),
    "glm4-moe": Glm4MoeConfig(
        **SHAPE,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        num_mtp_layers=0,
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        mlp_layer_types=["sparse", "dense", "sparse"],
        routed_scaling_factor=1.5,
        rope_parameters=YARN_ROPE | DEEPSEEK_SCALES,
    ),
    "ernie4.5": Ernie4_5Config(**SHAPE),
    "ernie4.5-moe": Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=8, moe_k=3, moe_intermediate_size=48, moe_num_shared_experts=2
    ),
    "exaone4": Exaone4Config(**SHAPE, layer_types=HYBRID, sliding_window=40),
    "exaone-moe": ExaoneMoeConfig(
        **SHAPE,
        layer_types=HYBRID,
        sliding_window=40,
        num_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        num_shared_experts=2,
        routed_scaling_factor=1.5,
    ),
    "cohere": CohereConfig(**COHERE, attention_bias=True),
    "cohere2": Cohere2Config(**COHERE, layer_types=HYBRID, sliding_window=40),
    "internlm3": InternLM3Config(**SHAPE, pad_token_id=0, bos_token_id=None),
    "iquest-coder": IQuestCoderConfig(**SHAPE, attention_bias=True, bos_token_id=None),
    "helium": HeliumConfig(**(SHAPE | {"hidden_size": 96}), attention_bias=True),
    "gpt-neox": GPTNeoXConfig(**WITHOUT_HEADS),
    "stablelm": StableLmConfig(**WITHOUT_HEADS, num_key_value_heads=2, use_qkv_bias=True),
    "nemotron": NemotronConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "starcoder2": Starcoder2Config(**SHAPE, sliding_window=40, bos_token_id=None),
    "arcee": ArceeConfig(**SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=YARN_ROPE),
    "apertus": ApertusConfig(**SHAPE, attention_bias=True, rope_parameters=LLAMA3_ROPE),
    "cwm": CwmConfig(**SHAPE, layer_types=HYBRID, sliding_window=40, bos_token_id=0),
    "ministral": MinistralConfig(**SHAPE, layer_types=HYBRID, sliding_window=40),
    # Most prompts are many times as long as queries stay the same.
    "ministral3": Ministral3Config(
        **SHAPE,
        rope_parameters=YARN_ROPE
        | {"factor": 128.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5},
    ),
    "hyperclovax": HyperCLOVAXConfig(
        **(GRANITE | {"hidden_size": 96, "logits_scaling": 0.25}), attention_bias=True
    ),
    "dots1": Dots1Config(
        **SHAPE,
        layer_types=HYBRID,
        sliding_window=40,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
    "solar-open": SolarOpenConfig(
        **{key: value for key, value in SHAPE.items() if key != "intermediate_size"},
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
    ),
    "mellum": MellumConfig(
        **SHAPE,
        layer_types=HYBRID,
        sliding_window=40,
        mlp_layer_types=["sparse", "dense", "sparse"],
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        rope_parameters={
            "full_attention": YARN_ROPE | {"truncate": True},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "minimax-m2": MiniMaxM2Config(
        **(SHAPE | {"head_dim": 32}),
        num_local_experts=6,
        num_experts_per_tok=3,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    **HYBRIDS,
}
