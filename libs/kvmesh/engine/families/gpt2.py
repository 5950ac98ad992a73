"""GPT-2: LayerNorms, learned positions instead of rotation, an MLP without a gate, biases
everywhere. The files hold transposed matrices.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("add_cross_attention", False)
    fields.only("head_dim", config.hidden_size // config.num_heads)
    fields.only("num_key_value_heads", config.num_heads)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    is_scaled = fields.flag("scale_attn_weights", default=True)
    return replace(
        config,
        intermediate_size=fields.number("n_inner", int, default=4 * config.hidden_size),
        attention_scale=config.attention_scale if is_scaled else 1.0,
        layer_norm=True,
        gated_mlp=False,
        positions_before=0,
        unrotated=frozenset(range(config.num_layers)),
    )


FIELD_NAMES = (
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_layer", "num_hidden_layers"),
    ("n_positions", "max_position_embeddings"),
)
"""Keys of config.json, also GPT-J's, with their usual names."""

FAMILY = Family(
    _configure,
    {"max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    activations=("gelu_new", "gelu_pytorch_tanh"),
    aliases=FIELD_NAMES,
    weight_prefix="transformer",
    tensor_names=(
        (".layers.", ".h."),
        ("transformer.embed_tokens.", "transformer.wte."),
        ("transformer.embed_positions.", "transformer.wpe."),
        ("transformer.norm.", "transformer.ln_f."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
    ),
)
