"""Attention with normalised values, whose keys and values later layers may reuse.

A layer that reuses another layer's KV writes it again to the same place, bit for bit. So rotation,
writing and attention are the same code as for all layers.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig, Rotation
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import Step
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class LentAttention:
    """One attention layer with its own or reused keys and values.

    Attributes:
        project: projection to queries, followed by keys and values if they are the layer's own.
        kept: number of columns of keys and values.
        borrows: whether it reuses another layer's keys and values.
        lends: whether other layers reuse its own.
    """

    project: Linear
    output: Linear
    spec: HeadSpec
    place: KvPlace
    head_dim: int
    rotation: Rotation
    kept: int
    borrows: bool
    lends: bool

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        qkv = self.project(h)
        if self.borrows:
            qkv = torch.cat([qkv, step.lent[self.place]], dim=1)
        else:
            self._normalise_values(qkv)
            if self.lends:
                # Copied here, since keys are normalised and rotated in place later.
                step.lent[self.place] = qkv[:, -self.kept :].clone()
        heads = qkv.view(len(h), -1, self.head_dim)
        attention = step.memory.attention[self.place.group]
        out = attention.run(heads, self.place.slot, self.spec, step.ropes[self.rotation])
        if keep is not None:
            out = out[keep]
        return self.output(out.flatten(1))

    def _normalise_values(self, qkv: Tensor) -> None:
        values = qkv[:, -self.kept // 2 :]
        heads = values.reshape(len(qkv), -1, self.head_dim)
        normed = functional.rms_norm(heads, (self.head_dim,), None, self.spec.norm_eps)
        values.copy_(normed.flatten(1))


def load_lent_attention(weights: LayerWeights, config: ModelConfig) -> LentAttention:
    """Reads one layer by its usual names.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    layer, hidden = weights.layer, config.hidden_size
    source, shape = config.kv_source(layer), config.head_shape(layer)
    head_dim, kept = shape.head_dim, shape.num_kv_heads * shape.head_dim
    queries = config.num_heads * head_dim
    parts = [("self_attn.q_proj.weight", queries)]
    if source == layer:
        same = config.full_keys_as_values and not config.sliding(layer)
        names = ("k_proj", "k_proj" if same else "v_proj")
        parts += [(f"self_attn.{name}.weight", kept) for name in names]
    q_norm = weights.vector("self_attn.q_norm.weight", head_dim)
    k_norm = replace(weights, layer=source).vector("self_attn.k_norm.weight", head_dim)
    norms = [q_norm.expand(config.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1)]
    return LentAttention(
        project=make_linear(weights.stacked(parts, hidden)),
        output=weights.linear("self_attn.o_proj.weight", hidden, queries),
        spec=HeadSpec(
            scale=config.attention_scale,
            window=config.windows[layer],
            qk_norm=torch.cat(norms),
            norm_eps=config.rms_norm_eps,
        ),
        place=weights.place,
        head_dim=head_dim,
        rotation=config.rotation(layer),
        kept=2 * kept,
        borrows=source != layer,
        lends=source == layer and config.kv_sources.count(layer) > 1,
    )
