"""Gemma 3 (text): windows in most layers with their own rope, norms before and after each part."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import (
    DENSE_MLP,
    GatedMlp,
    SelfAttention,
    Step,
    load_attention,
    load_gated_mlp,
)
from kvmesh.engine.models.family import Family, windows_of_types
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops, reference

# Weights of norms are stored as their difference from one.
_NORM_OFFSET = 1.0


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    types = fields.layer_types(config.num_layers)
    if types is None:
        every = fields.number("sliding_window_pattern", int, default=6)
        types = tuple(
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(config.num_layers)
        )
    if fields.raw.get("rope_parameters"):
        local = fields.rope(10000.0, "sliding_attention")
    else:
        # Older files stretch the global rope only.
        local = RopeConfig(fields.number("rope_local_base_freq", float, default=10000.0))
    scalar = fields.number("query_pre_attn_scalar", float, default=256.0)
    return replace(
        config,
        qk_norm=True,
        windows=windows_of_types(fields, types),
        local_rope=local,
        attention_scale=scalar**-0.5,
    )


@dataclass(frozen=True, slots=True)
class SandwichLayer:
    """Norm, attention, norm; norm, MLP, norm."""

    input_norm: Tensor
    attention: SelfAttention
    post_attention_norm: Tensor
    pre_mlp_norm: Tensor
    mlp: GatedMlp
    post_mlp_norm: Tensor
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.input_norm, self.eps)
        h = self.attention.run(h, step, keep)
        delta = layer_ops.add_rms_norm(h, None, self.post_attention_norm, self.eps)
        if keep is not None:
            x = x[keep]
        h = layer_ops.add_rms_norm(x, delta, self.pre_mlp_norm, self.eps)
        return x, layer_ops.add_rms_norm(self.mlp.run(h), None, self.post_mlp_norm, self.eps)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> SandwichLayer:
    hidden = config.hidden_size

    def norm(name: str) -> torch.Tensor:
        return weights.vector(f"{name}_layernorm.weight", hidden, _NORM_OFFSET)

    return SandwichLayer(
        input_norm=norm("input"),
        attention=load_attention(weights, config, norm_offset=_NORM_OFFSET),
        post_attention_norm=norm("post_attention"),
        pre_mlp_norm=norm("pre_feedforward"),
        mlp=load_gated_mlp(
            weights, DENSE_MLP, hidden, config.intermediate_size, reference.gelu_and_mul
        ),
        post_mlp_norm=norm("post_feedforward"),
        eps=config.rms_norm_eps,
    )


FAMILY = Family(
    _configure,
    _load_layer,
    head_dim=256,
    rope_theta=1e6,
    activation="gelu_pytorch_tanh",
    ties_embeddings=True,
    scales_embeddings=True,
    norm_offset=_NORM_OFFSET,
)
