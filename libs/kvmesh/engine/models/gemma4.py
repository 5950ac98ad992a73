"""Gemma 4: windows in most layers, whose heads are smaller than those of the others; norms before
and after each part, values normalised too; the last layers may read keys and values of earlier
ones; layers may be told of a token besides the stream, and may have experts beside the MLP.

Checkpoints that also see and hear are read for text only; those called unified do it otherwise,
which text does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import HeadShape, ModelConfig, MoeConfig
from kvmesh.engine.experts import load_experts
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import (
    DENSE_MLP,
    GatedMlp,
    Mixer,
    SparseMlp,
    Step,
    load_gated_mlp,
    make_sparse_mlp,
)
from kvmesh.engine.lent_attention import load_lent_attention
from kvmesh.engine.models.family import (
    SEEING_PREFIX,
    Family,
    types_or_each_nth,
    windows_of_types,
    with_ropes,
)
from kvmesh.engine.rope_fields import rope_of
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops, reference
from kvmesh.kernels.linear import Linear

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", "vision")
    types = types_or_each_nth(fields, config.num_layers, 6)
    # As transformers has it, whatever the file says.
    types = (*types[:-1], _FULL)
    if _SLIDING not in types:
        raise CheckpointError(f"{fields.origin}: layer_types without {_SLIDING} are not supported")
    ropes = with_ropes(fields, _ROPES, (_FULL, _SLIDING))
    size = fields.count("hidden_size_per_layer_input", default=256)
    vocab = fields.number("vocab_size_per_layer_input", int, default=262_144) if size else 0
    if size and vocab < config.vocab_size:
        raise CheckpointError(
            f"{fields.origin}: vocab_size_per_layer_input is {vocab}, below vocab_size"
        )
    return replace(
        config,
        windows=windows_of_types(fields, types),
        rope=rope_of(ropes, layer_type=_FULL),
        local_rope=rope_of(ropes, layer_type=_SLIDING),
        full_heads=_full_heads(fields, config, types),
        full_keys_as_values=fields.flag("attention_k_eq_v"),
        kv_sources=_kv_sources(fields, types),
        wide_readers=fields.flag("use_double_wide_mlp"),
        attention_scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=fields.real("final_logit_softcapping", 0.0),
        layer_input_size=size,
        layer_input_vocab=vocab,
        moe=_experts(fields, config),
    )


def _configure_unified(fields: Fields, config: ModelConfig) -> ModelConfig:
    # transformers does not look for the keys of what these have not.
    without = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return _configure(Fields({**fields.raw, **without}, fields.origin), config)


def _full_heads(fields: Fields, config: ModelConfig, types: tuple[str, ...]) -> HeadShape:
    """Heads of layers with full attention, by either of the keys that files have for them."""
    layers = fields.raw.get("per_layer_config")
    if layers is None:
        kv_heads = config.num_kv_heads
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.number("num_global_key_value_heads", int, default=kv_heads)
        return _heads(fields, config, kv_heads, fields.number("global_head_dim", int, default=512))
    said = {kind: _heads_said(fields, kind, types) for kind in (_FULL, _SLIDING)}
    if said[_SLIDING]:
        raise CheckpointError(
            f"{fields.origin}: per_layer_config of layers that layer_types has as {_SLIDING} is "
            "not supported"
        )
    own = Fields(said[_FULL], fields.origin)
    return _heads(
        fields,
        config,
        own.number("num_key_value_heads", int, default=config.num_kv_heads),
        own.number("head_dim", int, default=config.head_dim),
    )


def _heads(fields: Fields, config: ModelConfig, kv_heads: int, head_dim: int) -> HeadShape:
    if config.num_heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{fields.origin}: num_global_key_value_heads {kv_heads} of {config.num_heads} heads "
            f"and global_head_dim {head_dim} do not fit together"
        )
    return HeadShape(kv_heads, head_dim)


def _heads_said(fields: Fields, kind: str, types: tuple[str, ...]) -> dict[str, Any]:
    """What `per_layer_config` says of all layers of a kind."""
    table = fields.table("per_layer_config")
    by_layer: dict[int, Any] = {}
    for key, said in table.items():
        if not key.isdecimal() or not isinstance(said, Mapping):
            raise CheckpointError(f"{fields.origin}: per_layer_config must be objects by layer")
        by_layer[int(key)] = said
    found = [dict(by_layer.get(layer, {})) for layer, each in enumerate(types) if each == kind]
    others = {key for each in found for key in each} - {"head_dim", "num_key_value_heads"}
    if others or any(each != found[0] for each in found):
        raise CheckpointError(
            f"{fields.origin}: per_layer_config must be the same for all of a kind in layer_types, "
            "and of heads alone"
        )
    return found[0]


def _kv_sources(fields: Fields, types: tuple[str, ...]) -> tuple[int, ...]:
    """The last layers read the keys and values of the last of their kind before them."""
    count = fields.count("num_kv_shared_layers", default=0)
    if not count:
        return ()
    first = len(types) - count
    own = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    if own.keys() != set(types):
        raise CheckpointError(
            f"{fields.origin}: num_kv_shared_layers {count} of {len(types)} leaves a kind of layer "
            "without keys and values"
        )
    return tuple(layer if layer < first else own[kind] for layer, kind in enumerate(types))


def _experts(fields: Fields, config: ModelConfig) -> MoeConfig | None:
    if not fields.flag("enable_moe_block"):
        return None
    return MoeConfig(
        num_experts=fields.number("num_experts", int),
        top_k=fields.number("top_k_experts", int),
        intermediate_size=fields.number("moe_intermediate_size", int),
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
        # The MLP, which all rows take.
        shared_size=config.intermediate_size,
    )


@dataclass(frozen=True, slots=True)
class _MixedMlp:
    """An MLP and experts side by side, with norms on both sides of each but the first.

    Attributes:
        router_norm: [hidden], of what the choice is made by.
        expert_scale: [experts], of the chosen ones' weights.
    """

    mlp: GatedMlp
    mlp_norm: Tensor
    router_norm: Tensor
    experts_norm: Tensor
    experts: SparseMlp
    expert_scale: Tensor
    out_norm: Tensor
    eps: float

    def run(self, h: Tensor, x: Tensor) -> Tensor:
        """[rows, hidden] of the norm of the stream, and of the stream itself."""
        common = reference.rms_norm(self.mlp.run(h), self.mlp_norm, self.eps)
        scores = self.experts.router(reference.rms_norm(x, self.router_norm, self.eps))
        weights, chosen = self.experts.route(scores.float())
        read = reference.rms_norm(x, self.experts_norm, self.eps)
        mixed = self.experts.mix(read, weights * self.expert_scale[chosen], chosen)
        return common + reference.rms_norm(mixed, self.out_norm, self.eps)


@dataclass(frozen=True, slots=True)
class _Told:
    """What a layer makes of its own input.

    Attributes:
        layer: whose it is.
    """

    layer: int
    gate: Linear
    project: Linear
    norm: Tensor
    eps: float

    def run(self, x: Tensor, told: Tensor) -> Tensor:
        """[rows, hidden] and [rows, size] to [rows, hidden]."""
        part = functional.gelu(self.gate(x), approximate="tanh") * told
        return reference.rms_norm(self.project(part), self.norm, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Norm, attention, norm; norm, MLP, norm; input of the layer, norm; and a factor of it all."""

    input_norm: Tensor
    mixer: Mixer
    post_mixer_norm: Tensor
    pre_mlp_norm: Tensor
    mlp: GatedMlp | _MixedMlp
    post_mlp_norm: Tensor
    eps: float
    told: _Told | None
    factor: Tensor

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.input_norm, self.eps)
        h = self.mixer.run(h, step, keep)
        delta = layer_ops.add_rms_norm(h, None, self.post_mixer_norm, self.eps)
        if keep is not None:
            x = x[keep]
        h = layer_ops.add_rms_norm(x, delta, self.pre_mlp_norm, self.eps)
        out = self.mlp.run(h, x) if isinstance(self.mlp, _MixedMlp) else self.mlp.run(h)
        part = layer_ops.add_rms_norm(out, None, self.post_mlp_norm, self.eps)
        if self.told is not None:
            assert step.layer_inputs is not None, "the step tells layers nothing"
            told = step.layer_inputs[:, self.told.layer]
            x += part
            part = self.told.run(x, told if keep is None else told[keep])
        x *= self.factor
        return x, part * self.factor


def _load_layer(weights: LayerWeights, config: ModelConfig) -> _Layer:
    hidden, size = config.hidden_size, config.intermediate_size
    if config.wide_readers and config.kv_source(weights.layer) != weights.layer:
        size *= 2
    mlp = load_gated_mlp(weights, DENSE_MLP, hidden, size, reference.gelu_and_mul)

    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}_layernorm.weight", hidden)

    return _Layer(
        input_norm=norm("input"),
        mixer=load_lent_attention(weights, config),
        post_mixer_norm=norm("post_attention"),
        pre_mlp_norm=norm("pre_feedforward"),
        mlp=mlp if config.moe is None else _load_mixed(weights, config, config.moe, mlp),
        post_mlp_norm=norm("post_feedforward"),
        eps=config.rms_norm_eps,
        told=_load_told(weights, config) if config.layer_input_size else None,
        factor=weights.vector("layer_scalar", 1),
    )


def _load_mixed(
    weights: LayerWeights, config: ModelConfig, moe: MoeConfig, mlp: GatedMlp
) -> _MixedMlp:
    hidden = config.hidden_size
    scale = weights.exact("router.scale", (hidden,)) * hidden**-0.5

    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}.weight", hidden)

    return _MixedMlp(
        mlp=mlp,
        mlp_norm=norm("post_feedforward_layernorm_1"),
        router_norm=scale.to(weights.dtype),
        experts_norm=norm("pre_feedforward_layernorm_2"),
        experts=make_sparse_mlp(
            weights.linear("router.proj.weight", moe.num_experts, hidden),
            partial(layer_ops.route, top_k=moe.top_k, normalize=True),
            load_experts(weights, config, "experts", activation=reference.gelu_and_mul),
        ),
        expert_scale=weights.exact("router.per_expert_scale", (moe.num_experts,)),
        out_norm=norm("post_feedforward_layernorm_2"),
        eps=config.rms_norm_eps,
    )


def _load_told(weights: LayerWeights, config: ModelConfig) -> _Told:
    hidden, size = config.hidden_size, config.layer_input_size
    return _Told(
        layer=weights.layer,
        gate=weights.linear("per_layer_input_gate.weight", size, hidden),
        project=weights.linear("per_layer_projection.weight", hidden, size),
        norm=weights.vector("post_per_layer_input_norm.weight", hidden),
        eps=config.rms_norm_eps,
    )


FAMILY = Family(
    _configure,
    _load_layer,
    {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    activations=("gelu_pytorch_tanh",),
    computed_keys=frozenset({"final_logit_softcapping", "use_bidirectional_attention"}),
    rounds_embedding_scale=True,
)
SEEING = replace(FAMILY, weight_prefix=SEEING_PREFIX, decoders={"gemma4_text": {}})
UNIFIED = replace(
    FAMILY,
    configure=_configure_unified,
    defaults={**FAMILY.defaults, "sliding_window": 1024},
)
SEEING_UNIFIED = replace(UNIFIED, weight_prefix=SEEING_PREFIX, decoders={"gemma4_unified_text": {}})
