"""Multi-head latent attention (MLA) with its projections.

Decode rows attend to the latents directly: the up-projection of keys is absorbed into the query,
and that of values into the result. Prefill chunks expand their context into keys and values, which
is less work when many queries share it. Source: DeepSeek-V2, arXiv 2405.04434 §2.1.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmesh.engine.config import LatentConfig, ModelConfig, Rotation
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import Step
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference
from kvmesh.kernels.heads import RopeRows
from kvmesh.kernels.latent import causal_attention
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class CompressedQuery:
    """Query projection through a low-rank vector."""

    down: Linear
    norm: Tensor
    up: Linear
    eps: float

    def __call__(self, h: Tensor) -> Tensor:
        """[rows, hidden] to [rows, heads * (nope_dim + rope_dim)]."""
        return self.up(reference.rms_norm(self.down(h), self.norm, self.eps))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Latent attention of one layer.

    Attributes:
        query: projection to [heads * (nope_dim + rope_dim)].
        down: projection to the latent and the rotary key that all heads share.
        up: projection of latents to [heads * (nope_dim + value_dim)].
        key_up: [heads, nope_dim, rank], absorbed into queries.
        value_up: [heads, rank, value_dim], applied to attention output in latent space.
        rotates: whether positions are rotated at all.
        gate: projection to one factor per head of the output, before its sigmoid; or None.
    """

    query: Linear | CompressedQuery
    down: Linear
    norm: Tensor
    up: Linear
    key_up: Tensor
    value_up: Tensor
    output: Linear
    place: KvPlace
    shape: LatentConfig
    scale: float
    eps: float
    rotates: bool
    gate: Linear | None = None

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """[rows, hidden], normalised, to [rows or kept, hidden]."""
        shape = self.shape
        q = self.query(h).view(len(h), len(self.key_up), -1)
        q_nope, q_rope = torch.split(q, [shape.nope_dim, shape.rope_dim], dim=-1)
        latent, k_rope = torch.split(self.down(h), [shape.rank, shape.rope_dim], dim=-1)
        q_rope = self._rotate(q_rope, step.ropes[Rotation.USUAL])
        k_rope = self._rotate(k_rope.unsqueeze(1), step.ropes[Rotation.USUAL]).squeeze(1)
        memory = step.memory.latent[self.place.group]
        normed = reference.rms_norm(latent, self.norm, self.eps)
        memory.write(torch.cat([normed, k_rope], dim=-1), self.place.slot)

        outs = []
        if cut := memory.num_decode:
            # [heads, rows, nope] x [heads, nope, rank]
            absorbed = (q_nope[:cut].transpose(0, 1) @ self.key_up).transpose(0, 1)
            queries = torch.cat([absorbed, q_rope[:cut]], dim=-1)
            mixed = memory.decode(queries, self.place.slot, scale=self.scale, rank=shape.rank)
            outs.append((mixed.transpose(0, 1) @ self.value_up).transpose(0, 1))
        for rows, vectors in memory.chunks(self.place.slot):
            queries = torch.cat([q_nope[rows], q_rope[rows]], dim=-1)
            outs.append(causal_attention(queries, *self._expand(vectors), self.scale))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if keep is not None:
            out, h = out[keep], h[keep]
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(h).float()).to(out.dtype).unsqueeze(-1)
        return self.output(out.flatten(1))

    def _rotate(self, x: Tensor, rope: RopeRows) -> Tensor:
        return reference.apply_rope(x, rope.cos, rope.signed_sin) if self.rotates else x

    def _expand(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a context from its vectors, [positions, width]."""
        shape, heads = self.shape, len(self.key_up)
        latent, rope = torch.split(vectors, [shape.rank, shape.rope_dim], dim=-1)
        expanded = self.up(latent.contiguous()).view(len(vectors), heads, -1)
        nope, values = torch.split(expanded, [shape.nope_dim, shape.value_dim], dim=-1)
        keys = torch.cat([nope, rope.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        return keys, values


def halves_first(rows: Tensor, rope_dim: int) -> Tensor:
    """Reorders the last `rope_dim` rows of each head from interleaved pairs to two halves.

    Args:
        rows: [heads, dim, columns].
    """
    order = torch.arange(rows.shape[1])
    first = rows.shape[1] - rope_dim
    order[first:] = first + torch.cat([torch.arange(0, rope_dim, 2), torch.arange(1, rope_dim, 2)])
    return rows[:, order]


def load_latent_attention(
    weights: LayerWeights, config: ModelConfig, *, rotates: bool = True, gate: Linear | None = None
) -> LatentAttention:
    """Reads latent attention by its usual tensor names.

    Args:
        gate: see `LatentAttention`.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    shape, hidden, heads = config.latent, config.hidden_size, config.num_heads
    assert shape is not None
    query_dim = shape.nope_dim + shape.rope_dim

    def rotated_last(name: str, count: int, dim: int, columns: int) -> Tensor:
        rows = weights.tensor(name, (count * dim, columns)).view(count, dim, columns)
        if shape.interleaved:
            rows = halves_first(rows, shape.rope_dim)
        return rows.reshape(count * dim, columns)

    query: Linear | CompressedQuery
    if shape.query_rank:
        query = CompressedQuery(
            weights.linear("self_attn.q_a_proj.weight", shape.query_rank, hidden),
            weights.vector("self_attn.q_a_layernorm.weight", shape.query_rank),
            make_linear(
                rotated_last("self_attn.q_b_proj.weight", heads, query_dim, shape.query_rank)
            ),
            1e-6,
        )
    else:
        query = make_linear(rotated_last("self_attn.q_proj.weight", heads, query_dim, hidden))
    up = weights.tensor(
        "self_attn.kv_b_proj.weight", (heads * (shape.nope_dim + shape.value_dim), shape.rank)
    )
    per_head = up.view(heads, -1, shape.rank)
    return LatentAttention(
        query=query,
        down=make_linear(
            rotated_last("self_attn.kv_a_proj_with_mqa.weight", 1, shape.width, hidden)
        ),
        norm=weights.vector("self_attn.kv_a_layernorm.weight", shape.rank),
        up=make_linear(up),
        key_up=per_head[:, : shape.nope_dim].contiguous(),
        value_up=per_head[:, shape.nope_dim :].transpose(1, 2).contiguous(),
        output=weights.linear("self_attn.o_proj.weight", hidden, heads * shape.value_dim),
        place=weights.place,
        shape=shape,
        scale=config.attention_scale,
        eps=1e-6,
        rotates=rotates,
        gate=gate,
    )
