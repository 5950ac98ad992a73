"""A config of every family, small but with the parts and proportions of real ones."""

from __future__ import annotations

from typing import Any

LAYERS = 4
VOCAB = 16000

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
_HEADS = _COMMON | {"head_dim": 64}
_WINDOW = 128
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 384}
_LATENT = _COMMON | {
    "num_key_value_heads": 12,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}
_DELTA: dict[str, Any] = {
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
# The classes' own are those of vocabularies that are larger.
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 768,
    "n_layer": LAYERS,
    "n_head": 12,
    "n_positions": 4096,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
_CONVOLUTIONS_THEN_FULL = ["conv"] * (LAYERS - 1) + ["full_attention"]
_LINEAR_THEN_FULL = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]
_WINDOWS_THEN_FULL = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


# By label: the class of its configuration in transformers, and what that is given.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window": ("MistralConfig", _HEADS | {"sliding_window": _WINDOW}),
    "qwen2": ("Qwen2Config", _COMMON),
    "qwen3": ("Qwen3Config", _HEADS),
    "phi": ("PhiConfig", _HEADS | _IDS),
    "phi3": ("Phi3Config", _COMMON | _IDS),
    "phi3, longrope": (
        "Phi3Config",
        _COMMON
        | _IDS
        | {
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 24,
                "long_factor": [1.0 + pair for pair in range(24)],
            },
        },
    ),
    "seed-oss": ("SeedOssConfig", _HEADS),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        _COMMON | _EXPERTS | {"num_experts": 16, "shared_expert_intermediate_size": 384},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _HEADS
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "layer_types": _WINDOWS_THEN_FULL,
            "sliding_window": _WINDOW,
        },
    ),
    # The proportions of E2B: heads of 512 in layers without a window, inputs of each layer, and
    # half of the layers without keys and values of their own.
    "gemma4": (
        "Gemma4TextConfig",
        _HEADS
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "sliding_window": _WINDOW,
            "num_kv_shared_layers": LAYERS // 2,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma4, experts": (
        "Gemma4TextConfig",
        _HEADS
        | {
            "intermediate_size": 384,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "global_head_dim": 256,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "layer_types": _WINDOWS_THEN_FULL,
            "sliding_window": _WINDOW,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 16,
            "top_k_experts": 4,
            "moe_intermediate_size": 384,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        _HEADS
        | {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "sliding_window": _WINDOW,
        },
    ),
    "gemma": (
        "GemmaConfig",
        _HEADS | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
    ),
    "hunyuan": ("HunYuanDenseV1Config", _HEADS | _IDS),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        _HEADS | _IDS | {"intermediate_size": 384, "num_experts": 16, "moe_topk": 4},
    ),
    "hy-v3": ("HYV3Config", _HEADS | _EXPERTS | {"num_experts": 16}),
    "gpt-oss": (
        "GptOssConfig",
        _HEADS
        | {
            "intermediate_size": 384,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "sliding_window": _WINDOW,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        _HEADS | {"intermediate_size": 768, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", _HEADS | _EXPERTS | {"num_experts": 16}),
    "deepseek-v2": (
        "DeepseekV2Config",
        _LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("DeepseekV3Config", _LATENT),
    "qwen3-next": (
        "Qwen3NextConfig",
        _COMMON
        | _DELTA
        | _EXPERTS
        | {
            "layer_types": _LINEAR_THEN_FULL,
            "num_experts": 16,
            "shared_expert_intermediate_size": 384,
        },
    ),
    "qwen3.5": ("Qwen3_5TextConfig", _COMMON | _DELTA | {"layer_types": _LINEAR_THEN_FULL}),
    "kimi-linear": (
        "KimiLinearConfig",
        _without(_LATENT, "q_lora_rank", "n_group", "topk_group", "first_k_dense_replace")
        | {
            "pad_token_id": 0,
            "num_local_experts": 16,
            "layer_types": _LINEAR_THEN_FULL,
            "linear_num_heads": 6,
            "linear_head_dim": 128,
            # Transformers has no other for this family.
            "tie_word_embeddings": False,
        },
    ),
    "bailing-hybrid": (
        "BailingHybridConfig",
        _without(_LATENT, "q_lora_rank", "n_routed_experts")
        | {
            "pad_token_id": 0,
            "head_dim": _LATENT["qk_rope_head_dim"],
            "num_local_experts": 16,
            "layer_types": _LINEAR_THEN_FULL,
            "num_mtp_layers": 0,
            # As above.
            "tie_word_embeddings": False,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        _HEADS
        | {
            "intermediate_size": 768,
            "layer_types": _LINEAR_THEN_FULL,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        _HEADS | {"layer_types": _CONVOLUTIONS_THEN_FULL, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        _HEADS
        | _EXPERTS
        | {"layer_types": _CONVOLUTIONS_THEN_FULL, "num_dense_layers": 1, "num_experts": 16},
    ),
    "lfm3": (
        "Lfm3Config",
        _HEADS
        | _IDS
        | {
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "sliding_window": _WINDOW,
        },
    ),
    "granite": ("GraniteConfig", _HEADS | _GRANITE),
    "granite-moe": (
        "GraniteMoeConfig",
        _HEADS
        | _GRANITE
        | {"intermediate_size": 384, "num_local_experts": 16, "num_experts_per_tok": 4},
    ),
    "granite4": (
        "GraniteMoeHybridConfig",
        _HEADS
        | _GRANITE
        | {
            "layer_types": ["full_attention"] * LAYERS,
            "mamba_n_heads": 12,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "shared_intermediate_size": 2304,
        },
    ),
    "granite4-hybrid": (
        "GraniteMoeHybridConfig",
        _HEADS
        | _GRANITE
        | {
            "layer_types": _LINEAR_THEN_FULL,
            "mamba_n_heads": 24,
            "mamba_d_state": 128,
            "num_local_experts": 0,
            "shared_intermediate_size": 2304,
        },
    ),
    "smollm3": ("SmolLM3Config", _HEADS | _IDS),
    "olmo2": ("Olmo2Config", _HEADS | _IDS),
    "olmo3": (
        "Olmo3Config",
        _HEADS | _IDS | {"layer_types": _WINDOWS_THEN_FULL, "sliding_window": _WINDOW},
    ),
    "olmo-hybrid": (
        "OlmoHybridConfig",
        _COMMON | _DELTA | _IDS | {"layer_types": _LINEAR_THEN_FULL},
    ),
    "olmoe": (
        "OlmoeConfig",
        _HEADS | _IDS | {"intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 4},
    ),
    "glm": ("GlmConfig", _HEADS | _IDS),
    "glm4": ("Glm4Config", _HEADS | _IDS),
    "glm4-moe": (
        "Glm4MoeConfig",
        _HEADS | _EXPERTS | {"n_routed_experts": 16, "use_qk_norm": True, "num_mtp_layers": 0},
    ),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", _without(_LATENT, "first_k_dense_replace")),
    "ernie4.5": ("Ernie4_5Config", _HEADS),
    "ernie4.5-moe": (
        "Ernie4_5_MoeConfig",
        _HEADS
        | {
            "moe_num_experts": 16,
            "moe_k": 4,
            "moe_intermediate_size": 384,
            "moe_num_shared_experts": 1,
        },
    ),
    "exaone4": (
        "Exaone4Config",
        _HEADS | {"layer_types": _WINDOWS_THEN_FULL, "sliding_window": _WINDOW},
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        _HEADS
        | _EXPERTS
        | {"num_experts": 16, "layer_types": _WINDOWS_THEN_FULL, "sliding_window": _WINDOW},
    ),
    "cohere": ("CohereConfig", _HEADS | _IDS),
    "cohere2": (
        "Cohere2Config",
        _HEADS | _IDS | {"layer_types": _WINDOWS_THEN_FULL, "sliding_window": _WINDOW},
    ),
    "internlm3": ("InternLM3Config", _HEADS | _IDS),
    "iquest-coder": ("IQuestCoderConfig", _HEADS | _IDS),
    "helium": ("HeliumConfig", _HEADS | _IDS),
    "gpt2": ("GPT2Config", _GPT),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 32}),
    "opt": (
        "OPTConfig",
        _without(_COMMON, "intermediate_size", "num_key_value_heads", "initializer_range")
        | _IDS
        | {"ffn_dim": 3072},
    ),
    "falcon": (
        "FalconConfig",
        _without(_COMMON, "intermediate_size", "num_key_value_heads")
        | _IDS
        | {"new_decoder_architecture": True, "num_kv_heads": 4},
    ),
    "falcon-h1": (
        "FalconH1Config",
        _HEADS
        | _IDS
        | {
            "intermediate_size": 1536,
            "mamba_d_ssm": 768,
            "mamba_n_heads": 24,
            "mamba_d_state": 128,
        },
    ),
    "bamba": (
        "BambaConfig",
        _HEADS
        | _IDS
        | {"attn_layer_indices": [LAYERS - 1], "mamba_n_heads": 24, "mamba_d_state": 128},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        _without(_HEADS, "num_hidden_layers")
        | _IDS
        | _EXPERTS
        | {
            "layers_block_type": [
                *("linear_attention", "moe") * 3,
                *("linear_attention", "full_attention"),
            ],
            "mamba_num_heads": 24,
            "n_groups": 4,
            "n_routed_experts": 16,
            "moe_shared_expert_intermediate_size": 768,
            # As above.
            "tie_word_embeddings": False,
        },
    ),
    "afmoe": (
        "AfmoeConfig",
        _HEADS
        | _EXPERTS
        | {
            "num_experts": 16,
            "num_shared_experts": 1,
            "layer_types": _WINDOWS_THEN_FULL,
            "sliding_window": _WINDOW,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", _without(_COMMON, "num_key_value_heads") | _IDS),
    "stablelm": ("StableLmConfig", _COMMON | _IDS),
    "nemotron": ("NemotronConfig", _HEADS | _IDS),
    "starcoder2": ("Starcoder2Config", _HEADS | _IDS),
    "arcee": ("ArceeConfig", _HEADS | _IDS),
    "apertus": ("ApertusConfig", _HEADS | _IDS),
    "cwm": (
        "CwmConfig",
        _HEADS
        | _IDS
        | {"bos_token_id": 1, "layer_types": _WINDOWS_THEN_FULL, "sliding_window": _WINDOW},
    ),
    "ministral": (
        "MinistralConfig",
        _HEADS | {"layer_types": _WINDOWS_THEN_FULL, "sliding_window": _WINDOW},
    ),
    "ministral3": (
        "Ministral3Config",
        _HEADS
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 256,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "hyperclovax": ("HyperCLOVAXConfig", _HEADS | _GRANITE | {"logits_scaling": 0.125}),
    "dots1": (
        "Dots1Config",
        _HEADS
        | _EXPERTS
        | {
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "layer_types": _WINDOWS_THEN_FULL,
            "sliding_window": _WINDOW,
        },
    ),
    "solar-open": (
        "SolarOpenConfig",
        _without(_HEADS, "intermediate_size") | _EXPERTS | {"n_routed_experts": 16},
    ),
    "mellum": (
        "MellumConfig",
        _HEADS
        | _EXPERTS
        | {
            "num_experts": 16,
            "layer_types": _WINDOWS_THEN_FULL,
            "sliding_window": _WINDOW,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "minimax-m2": (
        "MiniMaxM2Config",
        _HEADS
        | {
            "intermediate_size": 384,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
}
# Transformers has only a growing cache for these.
WITHOUT_STATIC_CACHE = frozenset({"minimax"})
