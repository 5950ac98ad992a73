"""Hunyuan, dense and with experts: queries and keys are rotated, then normalised per head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import SelfAttention, load_attention
from kvmesh.engine.config import ModelConfig, MoeConfig, RopeConfig
from kvmesh.engine.experts import GroupRoute, experts_or_dense, load_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, Mlp, Step, load_mixer_layer
from kvmesh.engine.models.family import Family
from kvmesh.engine.rope_fields import rope_parameters
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference
from kvmesh.kernels.heads import RopeRows


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, rope=_rope(fields, config))


def _rope(fields: Fields, config: ModelConfig) -> RopeConfig:
    """The rotary embedding; "dynamic" is this family's own kind where it has an `alpha`."""
    parameters = rope_parameters(fields)
    if config.rope.kind != "dynamic" or not parameters.get("alpha"):
        return config.rope
    alpha = Fields(parameters, fields.origin).number("alpha", float)
    stretch = alpha ** (config.head_dim / max(config.head_dim - 2, 1))
    return replace(config.rope, theta=config.rope.theta * stretch)


def _configure_experts(fields: Fields, config: ModelConfig) -> ModelConfig:
    moe = MoeConfig(
        num_experts=fields.number("num_experts", int, default=1),
        top_k=_top_k(fields),
        intermediate_size=config.intermediate_size,
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
        shared_size=config.intermediate_size,
    )
    return replace(_configure(fields, config), moe=moe)


def _top_k(fields: Fields) -> int:
    """How many experts a row takes; files may say it for each layer."""
    said = fields.raw.get("num_experts_per_tok")
    if not isinstance(said, list):
        return fields.number("num_experts_per_tok", int, default=1)
    if len(set(map(repr, said))) != 1:
        raise CheckpointError(f"{fields.origin}: moe_topk must be the same for all layers")
    return Fields({"moe_topk": said[0]}, fields.origin).number("moe_topk", int)


@dataclass(frozen=True, slots=True)
class _LateNormAttention:
    """Attention whose queries and keys are rotated, then normalised.

    Attributes:
        inner: without norms.
        norms: [heads + kv_heads, head_dim].
    """

    inner: SelfAttention
    norms: Tensor
    eps: float

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """See `Mixer.run`."""
        inner, rope = self.inner, step.ropes[self.inner.rotation]
        heads = inner.qkv(h).view(len(h), -1, inner.head_dim)
        turned = heads[:, : len(self.norms)]
        rotated = reference.apply_rope(turned, rope.cos, rope.signed_sin)
        turned.copy_(reference.rms_norm(rotated, self.norms, self.eps))
        still = RopeRows(torch.ones_like(rope.cos), torch.zeros_like(rope.signed_sin))
        attention = step.memory.attention[inner.place.group]
        out = attention.run(heads, inner.place.slot, inner.spec, still)
        return inner.output((out if keep is None else out[keep]).flatten(1))


def _load_experts(weights: LayerWeights, config: ModelConfig) -> Mlp:
    moe = config.moe
    assert moe is not None
    route = GroupRoute(
        top_k=moe.top_k, num_groups=1, top_groups=1, normalize=True, scale=1.0, is_softmax=True
    )
    return load_routed(weights, config, route)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    norms = [
        weights.vector(f"self_attn.{name}_layernorm.weight", config.head_dim).expand(count, -1)
        for name, count in (("query", config.num_heads), ("key", config.num_kv_heads))
    ]
    inner = load_attention(weights, config)
    attention = _LateNormAttention(inner, torch.cat(norms), config.rms_norm_eps)
    mlp = experts_or_dense(weights, config, _load_experts)
    return load_mixer_layer(weights, config, attention, mlp)


_DEFAULTS = {"rms_norm_eps": 1e-5}
DENSE = Family(_configure, _load_layer, _DEFAULTS)
SPARSE = Family(
    _configure_experts,
    _load_layer,
    _DEFAULTS,
    aliases=(("moe_topk", "num_experts_per_tok"), ("num_local_experts", "num_experts")),
    tensor_names=(
        (".mlp.gate.weight", ".mlp.gate.wg.weight"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    ),
)
