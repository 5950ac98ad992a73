"""Layers of MiniMax-Text-01; see families/minimax.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import W1_W3_W2, load_softmax_routed
from kvmesh.engine.layers import Mixer, Mlp, Step
from kvmesh.engine.lightning import LightningAttention, head_slopes
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


@dataclass(frozen=True, slots=True)
class _ScaledLayer:
    """Layer with norms before attention and MLP, whose outputs become the residual stream.

    Attributes:
        mixer_factors, mlp_factors: factors of the stream and of the addition to it.
    """

    input_norm: Tensor
    mixer: Mixer
    mixer_factors: tuple[float, float]
    post_norm: Tensor
    mlp: Mlp
    mlp_factors: tuple[float, float]
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.input_norm, self.eps)
        part = self.mixer.run(h, step, keep) * self.mixer_factors[1]
        if keep is not None:
            h = h[keep]
        h = layer_ops.add_rms_norm(h * self.mixer_factors[0], part, self.post_norm, self.eps)
        return h * self.mlp_factors[0], self.mlp.run(h) * self.mlp_factors[1]


def _load_lightning(weights: LayerWeights, config: ModelConfig) -> LightningAttention:
    shape, hidden = config.linear, config.hidden_size
    assert shape is not None
    values = shape.num_value_heads * shape.value_dim
    slopes = head_slopes(shape.num_value_heads, weights.layer, config.num_layers)
    return LightningAttention(
        qkv=weights.linear("self_attn.qkv_proj.weight", 3 * values, hidden),
        gate=weights.linear("self_attn.output_gate.weight", values, hidden),
        norm=weights.vector("self_attn.norm.weight", values),
        slopes=slopes.to(weights.device),
        output=weights.linear("self_attn.out_proj.weight", hidden, values),
        place=weights.place,
        shape=shape,
    )


def load_layer(weights: LayerWeights, config: ModelConfig) -> _ScaledLayer:
    """See `LoadLayer`."""
    hidden = config.hidden_size
    full, linear, mlp = config.residual_factors
    is_linear = config.is_linear(weights.layer)
    mixer: Mixer
    mixer = _load_lightning(weights, config) if is_linear else load_attention(weights, config)
    return _ScaledLayer(
        input_norm=weights.vector("input_layernorm.weight", hidden),
        mixer=mixer,
        mixer_factors=linear if is_linear else full,
        post_norm=weights.vector("post_attention_layernorm.weight", hidden),
        mlp=load_softmax_routed(weights, config, "block_sparse_moe", W1_W3_W2),
        mlp_factors=mlp,
        eps=config.rms_norm_eps,
    )
