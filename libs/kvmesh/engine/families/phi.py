"""Phi-1, 1.5 and 2: LayerNorms, attention and an MLP without a gate in parallel after one norm,
rotation of at most half of each head, biases everywhere, including the head.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("qk_layernorm", False)
    return replace(
        config,
        layer_norm=True,
        parallel=True,
        gated_mlp=False,
        mlp_bias=True,
        qkv_bias=True,
        output_bias=True,
        head_bias=True,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
    )


FAMILY = Family(
    _configure,
    {"rms_norm_eps": 1e-5},
    activations=("gelu_new",),
    aliases=(("layer_norm_eps", "rms_norm_eps"),),
    tensor_names=(
        ("model.norm.", "model.final_layernorm."),
        (".self_attn.o_proj.", ".self_attn.dense."),
        (".mlp.up_proj.", ".mlp.fc1."),
        (".mlp.down_proj.", ".mlp.fc2."),
    ),
)
