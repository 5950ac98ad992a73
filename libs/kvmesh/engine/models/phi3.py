"""Phi-3 and Phi-4: Llama whose files hold queries, keys and values as one, gates and ups too."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, load_joined_mlp, load_mixer_layer
from kvmesh.engine.models.family import Family, uniform_window
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    if config.rope.kind != "default":
        # transformers reads "yarn" as this family's own kind, which is not computed.
        raise CheckpointError(
            f"{fields.origin}: rope_type {config.rope.kind!r} is not supported in phi3"
        )
    return replace(
        config, windows=uniform_window(fields, config), qkv_bias=False, output_bias=False
    )


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    hidden, head_dim = config.hidden_size, config.head_dim
    values = config.num_heads * head_dim
    total = values + 2 * config.num_kv_heads * head_dim
    attention = SelfAttention(
        qkv=weights.linear("self_attn.qkv_proj.weight", total, hidden),
        output=weights.linear("self_attn.o_proj.weight", hidden, values),
        spec=HeadSpec(scale=config.attention_scale, window=config.windows[weights.layer]),
        place=weights.place,
        head_dim=head_dim,
    )
    return load_mixer_layer(weights, config, attention, load_joined_mlp(weights, config))


FAMILY = Family(_configure, _load_layer, {"rms_norm_eps": 1e-5})
