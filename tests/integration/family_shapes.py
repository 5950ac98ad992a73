"""Sizes that tiny configs of families share."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320

# Wide initial weights spread the logits, so that rounding never decides.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
    "truncate": False,
}
# Of heads of 16, of which 12 are rotated.
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 3.0, 9.0, 20.0, 31.0],
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_SCALES = {"mscale": 0.7, "mscale_all_dim": 1.0}
LATENT: dict[str, Any] = {
    **{key: value for key, value in SHAPE.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
BAILING_OTHER_KEYS = ("q_lora_rank", "n_routed_experts")
KIMI_KEYS = LATENT.keys() - {"q_lora_rank", "n_group", "topk_group", "first_k_dense_replace"}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
LINEAR_FIRST = ["linear_attention", "linear_attention", "full_attention"]
# Heads are what the hidden size leaves for each.
WITHOUT_HEADS: dict[str, Any] = {
    key: value for key, value in SHAPE.items() if key not in {"head_dim", "num_key_value_heads"}
} | {"hidden_size": 96}
CONVOLUTIONS = ["conv", "full_attention", "conv"]
HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
# The epsilon is large enough to matter: the family keeps its stream in another scale.
GRANITE: dict[str, Any] = SHAPE | {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "rms_norm_eps": 0.1,
}
# transformers wants heads of Mamba that fit, whether there are such layers or not.
GRANITE4: dict[str, Any] = GRANITE | {"layer_types": ["full_attention"] * 3, "mamba_n_heads": 4}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 4096,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
}
FALCON: dict[str, Any] = WITHOUT_HEADS | {"bos_token_id": None, "ffn_hidden_size": 112}
FALCON_H1: dict[str, Any] = SHAPE | {
    "pad_token_id": 0,
    "bos_token_id": None,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}
NEMOTRON_H: dict[str, Any] = SHAPE | {
    "pad_token_id": 0,
    "bos_token_id": None,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "n_groups": 2,
    "ssm_state_size": 24,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
COHERE: dict[str, Any] = SHAPE | {"hidden_size": 96, "bos_token_id": None, "logit_scale": 0.25}
