"""Models of real proportions, for steps on a device that is not there (compiled_steps.py)."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
LATENT: dict[str, Any] = COMMON | {
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"model_type": "llama"},
    "qwen3_moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_next": COMMON
    | {
        "model_type": "qwen3_next",
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": LATENT
    | {
        "model_type": "deepseek_v3",
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
    },
    "kimi_linear": LATENT
    | {
        "model_type": "kimi_linear",
        "q_lora_rank": None,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 64,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
    },
    "bailing_hybrid": LATENT
    | {
        "model_type": "bailing_hybrid",
        "num_experts": 64,
        "num_shared_experts": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax": COMMON
    | {
        "model_type": "minimax",
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": COMMON
    | {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 1024,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
    },
    # Layers of E4B's sizes; the last two read keys and values of the first two.
    "gemma4_text": COMMON
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 512,
        "hidden_act": "gelu_pytorch_tanh",
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 32_000,
        "final_logit_softcapping": 30.0,
    },
    "gpt_oss": COMMON
    | {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "olmo3": COMMON
    | {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4096,
    },
    "glm4": COMMON | {"model_type": "glm4", "attention_bias": True},
    "cohere2": COMMON
    | {
        "model_type": "cohere2",
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4096,
    },
    "minimax_m2": COMMON
    | {
        "model_type": "minimax_m2",
        "rotary_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 8,
    },
    "ministral3": COMMON
    | {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "starcoder2": COMMON | {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"},
    "granitemoehybrid": COMMON
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 32,
        "mamba_d_state": 128,
        "num_local_experts": 0,
        "shared_intermediate_size": 2816,
    },
    "nemotron_h": COMMON
    | {
        "model_type": "nemotron_h",
        "hidden_act": None,
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 32,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 1024,
    },
    "lfm2": COMMON
    | {"model_type": "lfm2", "head_dim": 64, "layer_types": ["conv", "full_attention"]},
}
"""The sizes of published models but for their number of layers and vocabulary, by `model_type`."""
