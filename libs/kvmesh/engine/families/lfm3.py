"""LFM3: short convolutions in most layers, attention in the others, some with a window and a rope
of their own. Attention has norms of queries and keys and a gate per head; each part has norms
before and after it.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families import lfm2
from kvmesh.engine.families.family import Family, windows_of_types, with_ropes
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_of

_FULL, _SLIDING = "full_attention", "sliding_attention"

_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers) or tuple(
        map(_usual_type, range(config.num_layers))
    )
    ropes = with_ropes(fields, _ROPES, {_FULL, _SLIDING}.intersection(types))
    usual = replace(
        config,
        windows=windows_of_types(fields, types),
        rope=rope_of(ropes, 1e6, _FULL),
        local_rope=rope_of(ropes, 1e6, _SLIDING),
        part_norms=fields.flag("use_sandwich_norm", default=True),
        head_gate=fields.flag("use_attention_gate", default=True),
    )
    return lfm2.with_convolutions(fields, usual, types, usual_kernel=7)


def _usual_type(layer: int) -> str:
    if layer % 4 == 2:
        return _FULL
    return _SLIDING if layer % 4 == 0 and layer else "conv"


FAMILY = Family(
    _configure,
    {
        "head_dim": 128,
        "intermediate_size": 7680,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 256,
        "tie_word_embeddings": True,
    },
    aliases=lfm2.DENSE.aliases,
    tensor_names=(
        (".input_layernorm.", ".operator_norm."),
        (".post_attention_layernorm.", ".ffn_norm."),
        (".mlp.gate_proj.", ".mlp.w1."),
        (".mlp.up_proj.", ".mlp.w3."),
        (".mlp.down_proj.", ".mlp.w2."),
        (".mlp.", ".feed_forward."),
        ("model.norm.", "model.embedding_norm."),
    ),
)
