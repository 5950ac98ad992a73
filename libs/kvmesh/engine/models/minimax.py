"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, experts in
all; the residual stream starts at the norms and both of its parts are scaled.

Source: MiniMax-01, arXiv 2501.08313.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.experts import W1_W3_W2, load_softmax_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import Mixer, Mlp, Step
from kvmesh.engine.lightning import LightningAttention, head_slopes
from kvmesh.engine.models.family import Family, uniform_window
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("rotary_dim", config.head_dim)
    types = fields.layer_types(config.num_layers)
    if types is None:
        layers = frozenset(range(1, config.num_layers, 2))
    else:
        layers = frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    experts = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"

    def factor(name: str) -> float:
        return fields.number(f"{name}_factor", float, default=1.0)

    return replace(
        config,
        windows=uniform_window(fields, config),
        qkv_bias=False,
        output_bias=False,
        linear=LinearConfig(
            layers=layers,
            num_key_heads=config.num_heads,
            num_value_heads=config.num_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            conv_kernel=1,
        ),
        moe=MoeConfig(
            num_experts=fields.number(experts, int, default=8),
            top_k=fields.number("num_experts_per_tok", int, default=2),
            intermediate_size=config.intermediate_size,
            normalize=True,
            sparse_layers=frozenset(range(config.num_layers)),
        ),
        residual_factors=tuple(
            (factor(f"{kind}_alpha"), factor(f"{kind}_beta"))
            for kind in ("full_attn", "linear_attn", "mlp")
        ),
    )


@dataclass(frozen=True, slots=True)
class _ScaledLayer:
    """Norm, attention, norm, MLP; what a norm gave is the stream that the part is added to.

    Attributes:
        mixer_factors, mlp_factors: of the stream and of the part that is added.
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


def _load_layer(weights: LayerWeights, config: ModelConfig) -> _ScaledLayer:
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


FAMILY = Family(_configure, _load_layer, {"rms_norm_eps": 1e-5}, rope_theta=1e6)
