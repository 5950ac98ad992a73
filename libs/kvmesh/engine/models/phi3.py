"""Phi-3 and Phi-4: Llama whose files hold queries, keys and values as one, gates and ups too."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import SelfAttention, rotated_halves
from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, load_joined_mlp, load_mixer_layer
from kvmesh.engine.models.family import Family, uniform_window
from kvmesh.engine.rope_fields import rope_of, rope_parameters, rotary_dim
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import make_linear

_ORIGINAL = "original_max_position_embeddings"


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # transformers reads "yarn" as this family's own kind, whose older name is "su".
    if config.rope.kind not in ("default", "longrope"):
        raise CheckpointError(
            f"{fields.origin}: rope_type {config.rope.kind!r} is not supported in phi3; supported "
            "are default and longrope"
        )
    rotated = rotary_dim(fields, config.head_dim)
    return replace(
        config,
        rope=_rope(fields, config.rope),
        rotary_dim=0 if rotated == config.head_dim else rotated,
        windows=uniform_window(fields, config),
        qkv_bias=False,
        output_bias=False,
    )


def _rope(fields: Fields, usual: RopeConfig) -> RopeConfig:
    """The rotary embedding; the original length lies beside its other parameters and wins."""
    if usual.kind == "default":
        return usual
    original = fields.number(_ORIGINAL, int, default=4096)
    table = {**rope_parameters(fields), _ORIGINAL: original}
    return rope_of(Fields({**fields.raw, "rope_parameters": table}, fields.origin))


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    hidden, head_dim = config.hidden_size, config.head_dim
    values = config.num_heads * head_dim
    attention = SelfAttention(
        qkv=make_linear(_projection(weights, config)),
        output=weights.linear("self_attn.o_proj.weight", hidden, values),
        spec=HeadSpec(scale=config.attention_scale, window=config.windows[weights.layer]),
        place=weights.place,
        head_dim=head_dim,
    )
    return load_mixer_layer(weights, config, attention, load_joined_mlp(weights, config))


def _projection(weights: LayerWeights, config: ModelConfig) -> Tensor:
    """Weights of queries, keys and values, with rotated pairs half a head apart."""
    head_dim, rotated = config.head_dim, config.num_heads + config.num_kv_heads
    rows = (rotated + config.num_kv_heads) * head_dim
    weight = weights.stacked([("self_attn.qkv_proj.weight", rows)], config.hidden_size)
    if config.rotary_dim:
        heads = weight.view(-1, head_dim, config.hidden_size)
        heads[:rotated] = heads[:rotated, rotated_halves(head_dim, config.rotary_dim)]
    return weight


FAMILY = Family(_configure, _load_layer, {"rms_norm_eps": 1e-5})
