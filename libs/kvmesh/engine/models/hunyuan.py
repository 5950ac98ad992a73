"""Layers of Hunyuan; see families/hunyuan.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.engine.attention import SelfAttention, load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import GroupRoute, experts_or_dense, load_routed
from kvmesh.engine.layers import MixerLayer, Mlp, Step, load_mixer_layer
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference
from kvmesh.kernels.heads import RopeRows


@dataclass(frozen=True, slots=True)
class _LateNormAttention:
    """Attention whose queries and keys are rotated, then normalised.

    Attributes:
        inner: the attention without norms.
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


def load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    """See `LoadLayer`."""
    norms = [
        weights.vector(f"self_attn.{name}_layernorm.weight", config.head_dim).expand(count, -1)
        for name, count in (("query", config.num_heads), ("key", config.num_kv_heads))
    ]
    inner = load_attention(weights, config)
    attention = _LateNormAttention(inner, torch.cat(norms), config.rms_norm_eps)
    mlp = experts_or_dense(weights, config, _load_experts)
    return load_mixer_layer(weights, config, attention, mlp)
