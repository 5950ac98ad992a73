"""OPT: LayerNorms, learned positions instead of rotation, an MLP without a gate. OPT-350M is not
supported: its norms come after its parts, and its embeddings are smaller than its stream.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("_remove_final_layer_norm", False)
    fields.only("do_layer_norm_before", True)
    fields.only("head_dim", config.hidden_size // config.num_heads)
    fields.only("layer_norm_elementwise_affine", True)
    fields.only("num_key_value_heads", config.num_heads)
    fields.only("word_embed_proj_dim", config.hidden_size)
    bias = fields.flag("enable_bias", default=True)
    return replace(
        config,
        rms_norm_eps=1e-5,
        layer_norm=True,
        gated_mlp=False,
        mlp_bias=bias,
        qkv_bias=bias,
        output_bias=bias,
        # Two rows for padding in training precede the first position.
        positions_before=2,
        unrotated=frozenset(range(config.num_layers)),
    )


FAMILY = Family(
    _configure,
    {"intermediate_size": 3072, "max_position_embeddings": 2048, "tie_word_embeddings": True},
    activations=("relu",),
    aliases=(("ffn_dim", "intermediate_size"),),
    weight_prefix="model.decoder",
    tensor_names=(
        ("model.decoder.norm.", "model.decoder.final_layer_norm."),
        (".input_layernorm.", ".self_attn_layer_norm."),
        (".post_attention_layernorm.", ".final_layer_norm."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".mlp.up_proj.", ".fc1."),
        (".mlp.down_proj.", ".fc2."),
    ),
)
