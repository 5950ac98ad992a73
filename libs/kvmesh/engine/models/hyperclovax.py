"""HyperCLOVA X: Granite with norms on both sides of attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvmesh.engine.attention import load_attention, load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import DENSE_MLP, Layer, load_gated_mlp
from kvmesh.engine.models.family import Family
from kvmesh.engine.models.granite import scaled
from kvmesh.engine.norm_orders import SandwichLayer
from kvmesh.engine.weights import LayerWeights


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    usual = {"attention_multiplier": config.attention_scale}
    given = {key: value for key, value in fields.raw.items() if value is not None}
    known = Fields({**usual, **given}, fields.origin)
    # Granite divides by it.
    configured = replace(
        scaled(known, config), logit_scale=fields.number("logits_scaling", float, default=1.0)
    )
    if not fields.flag("use_post_norm", default=True):
        return configured
    # A norm is the last of each part: its weight takes the factor, and the stream is as it is.
    factor = fields.number("residual_multiplier", float, default=1.0)
    return replace(
        configured,
        rms_norm_eps=config.rms_norm_eps,
        embedding_scale=configured.embedding_scale * factor,
        residual_factors=((1.0, factor),) * 3,
    )


def _load_layer(weights: LayerWeights, config: ModelConfig) -> Layer:
    if not config.residual_factors:
        return load_pre_norm_layer(weights, config)
    hidden, (_, factor) = config.hidden_size, config.residual_factors[0]

    def scaled_norm(name: str) -> Tensor:
        return (weights.exact(f"{name}.weight", (hidden,)) * factor).to(weights.dtype)

    return SandwichLayer(
        input_norm=weights.vector("input_layernorm.weight", hidden),
        mixer=load_attention(weights, config),
        post_mixer_norm=scaled_norm("post_norm1"),
        pre_mlp_norm=weights.vector("post_attention_layernorm.weight", hidden),
        mlp=load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size),
        post_mlp_norm=scaled_norm("post_norm2"),
        eps=config.rms_norm_eps,
    )


FAMILY = Family(_configure, _load_layer)
