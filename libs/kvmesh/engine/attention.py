"""Attention over keys and values: projections, norms and rotation, read by usual tensor names.

Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvmesh.engine.config import ModelConfig, Rotation
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.layers import (
    DENSE_MLP,
    MixerLayer,
    Mlp,
    Step,
    load_gated_mlp,
    load_mixer_layer,
)
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import reference
from kvmesh.kernels.dispatch import HostAttention
from kvmesh.kernels.heads import HeadSpec, RopeRows
from kvmesh.kernels.host_layer import AttentionCall, DecodeRows, takes
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class WideNorm:
    """Norms of queries and keys over all their heads at once.

    Attributes:
        query: [heads * head_dim].
        key: [kv_heads * head_dim].
    """

    query: Tensor
    key: Tensor
    eps: float

    def apply(self, qkv: Tensor) -> None:
        """Normalises the first columns of [rows, (heads + 2 * kv_heads) * head_dim] in place."""
        first = 0
        for weight in (self.query, self.key):
            part = qkv[:, first : first + len(weight)]
            part.copy_(reference.rms_norm(part, weight, self.eps))
            first += len(weight)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Attention with its projections.

    Attributes:
        qkv: projection to [(heads + 2 * kv_heads) * head_dim], q, then k, then v.
        place: place of its keys and values in the KV pool.
        rotation: key of its rotary embedding in `Step.ropes`.
        gate: projection to one factor per head, or per value of its output, before its sigmoid;
            or None.
        wide_norm: norm of queries and keys before they are split into heads, or None.
        has_factors: whether queries are multiplied by `Step.query_factors`.
        call: native call for decode rows on the CPU; None if several calls are needed.
    """

    qkv: Linear
    output: Linear
    spec: HeadSpec
    place: KvPlace
    head_dim: int
    rotation: Rotation = Rotation.USUAL
    gate: Linear | None = None
    wide_norm: WideNorm | None = None
    has_factors: bool = False
    call: AttentionCall | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        is_plain = self.gate is None and self.wide_norm is None
        if is_plain and not self.has_factors:
            made = AttentionCall.of(
                self.qkv, self.output, self.spec, self.head_dim, self.place.slot
            )
            object.__setattr__(self, "call", made)

    @property
    def reads(self) -> tuple[int, Rotation]:
        """See `CallableMixer.reads`."""
        return self.place.group, self.rotation

    def decode_rows(self, step: Step) -> DecodeRows | None:
        """See `CallableMixer.decode_rows`."""
        attention = step.memory.attention[self.place.group]
        return attention.decode_rows if isinstance(attention, HostAttention) else None

    def rope(self, step: Step) -> RopeRows:
        """See `CallableMixer.rope`."""
        return step.ropes[self.rotation]

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        attention = step.memory.attention[self.place.group]
        rope = step.ropes[self.rotation]
        if self.call is not None and keep is None and takes(h):
            rows = self.decode_rows(step)
            if rows is not None:
                return self.call.run(h, rows, rope)
        qkv = self.qkv(h)
        if self.wide_norm is not None:
            self.wide_norm.apply(qkv)
        if self.has_factors:
            assert step.query_factors is not None
            qkv[:, : self.output.weight.shape[1]] *= step.query_factors
        heads = qkv.view(len(h), -1, self.head_dim)
        out = attention.run(heads, self.place.slot, self.spec, rope)
        if keep is not None:
            out, h = out[keep], h[keep]
        if self.gate is not None:
            factors, count = torch.sigmoid(self.gate(h)), out.shape[1]
            out = out * factors.view(len(out), count, factors.shape[1] // count)
        return self.output(out.flatten(1))


def load_attention(
    weights: LayerWeights,
    config: ModelConfig,
    *,
    sinks: Tensor | None = None,
    norm_offset: float = 0.0,
    gated: bool = False,
) -> SelfAttention:
    """Reads attention by its usual names.

    Args:
        sinks: [heads], see `attention_reference.decode_attention`.
        norm_offset: value added to the norm weights of queries and keys.
        gated: the query projection holds a gate beside each head's query.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    head_dim, layer = config.head_dim, weights.layer
    values = config.num_heads * head_dim
    order = _head_order(config)
    qkv, gate = _projections(weights, config, order, gated=gated)
    output_bias = None
    if config.output_bias:
        output_bias = weights.vector("self_attn.o_proj.bias", config.hidden_size)
    return SelfAttention(
        qkv=make_linear(qkv, _qkv_bias(weights, config, order) if config.qkv_bias else None),
        output=weights.linear("self_attn.o_proj.weight", config.hidden_size, values, output_bias),
        spec=HeadSpec(
            scale=config.attention_scale,
            window=config.windows[layer],
            sinks=sinks,
            qk_norm=_head_norms(weights, config, order, norm_offset) if config.qk_norm else None,
            norm_eps=config.rms_norm_eps,
            cap=config.attention_cap,
        ),
        place=weights.place,
        head_dim=head_dim,
        rotation=config.rotation(layer),
        gate=gate,
        wide_norm=_wide_norm(weights, config, order) if config.wide_qk_norm else None,
        has_factors=config.query_growth is not None,
    )


def _projections(
    weights: LayerWeights, config: ModelConfig, order: list[int] | None, *, gated: bool
) -> tuple[Tensor, Linear | None]:
    """Returns the stacked weights of queries, keys and values, and the gate."""
    hidden, head_dim = config.hidden_size, config.head_dim
    parts = [(f"self_attn.{name}_proj.weight", rows) for name, rows in _qkv_rows(config)]
    if not gated and order is None:
        return weights.stacked(parts, hidden), None
    share = 2 if gated else 1
    (q_name, q_rows), *others = parts
    q = weights.tensor(q_name, (share * q_rows, hidden)).view(config.num_heads, -1, hidden)
    k, v = (weights.tensor(name, (rows, hidden)) for name, rows in others)
    gate = make_linear(q[:, head_dim:].flatten(0, 1)) if gated else None
    queries = q[:, :head_dim].flatten(0, 1)
    return torch.cat([_reordered(queries, order), _reordered(k, order), v]), gate


def _qkv_rows(config: ModelConfig) -> list[tuple[str, int]]:
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    return [(name, count * config.head_dim) for name, count in zip("qkv", heads, strict=True)]


def _qkv_bias(weights: LayerWeights, config: ModelConfig, order: list[int] | None) -> Tensor:
    q, k, v = (
        weights.vector(f"self_attn.{name}_proj.bias", rows) for name, rows in _qkv_rows(config)
    )
    return torch.cat([_reordered(q, order), _reordered(k, order), v])


def _head_norms(
    weights: LayerWeights, config: ModelConfig, order: list[int] | None, offset: float
) -> Tensor:
    """Returns the norm weights of each head, [heads + kv_heads, head_dim]."""
    q, k = (
        weights.vector(f"self_attn.{name}_norm.weight", config.head_dim, offset) for name in "qk"
    )
    rows = [
        _reordered(q, order).expand(config.num_heads, -1),
        _reordered(k, order).expand(config.num_kv_heads, -1),
    ]
    return torch.cat(rows)


def _wide_norm(weights: LayerWeights, config: ModelConfig, order: list[int] | None) -> WideNorm:
    q, k = (
        weights.vector(f"self_attn.{name}_norm.weight", rows)
        for name, rows in _qkv_rows(config)[:2]
    )
    return WideNorm(_reordered(q, order), _reordered(k, order), config.rms_norm_eps)


def _head_order(config: ModelConfig) -> list[int] | None:
    """Returns the order of a head's elements; None if it is that of the files."""
    if not (config.rotary_dim or config.interleaved):
        return None
    rotated = config.rotary_dim or config.head_dim
    return rotated_halves(config.head_dim, rotated, interleaved=config.interleaved)


def _reordered(rows: Tensor, order: list[int] | None) -> Tensor:
    """Reorders the rows of every head."""
    if order is None:
        return rows
    heads = rows.view(-1, len(order), *rows.shape[1:])
    return heads[:, order].flatten(0, 1)


def rotated_halves(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> list[int]:
    """Returns an order of a head's elements in which rotated pairs lie half a head apart.

    In the files only the first `rotary_dim` elements of a head are rotated. In this order the
    others form pairs too, with angle 0, so that one kernel serves all (`rope_table`).

    Args:
        interleaved: pairs are neighbours in the files, not half of the rotated elements apart.
    """
    pairs, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    rotated = range(rotary_dim)
    first, second = rotated[:pairs], rotated[pairs:]
    if interleaved:
        first, second = rotated[::2], rotated[1::2]
    return [
        *first,
        *range(rotary_dim, rotary_dim + rest),
        *second,
        *range(rotary_dim + rest, head_dim),
    ]


def load_pre_norm_layer(
    weights: LayerWeights,
    config: ModelConfig,
    mlp: Mlp | None = None,
    sinks: Tensor | None = None,
) -> MixerLayer:
    """Reads a layer with attention by its usual names.

    Args:
        mlp: None for the dense one.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    dense = (weights, DENSE_MLP, config.hidden_size, config.intermediate_size)
    attention = load_attention(weights, config, sinks=sinks)
    return load_mixer_layer(weights, config, attention, mlp or load_gated_mlp(*dense))
