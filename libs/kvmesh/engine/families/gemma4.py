"""Gemma 4: windows in most layers, whose heads are smaller than those of full layers; norms before
and after each part, and of values. The last layers may reuse KV of earlier ones. Layers may have
per-layer embeddings, and experts beside the MLP.

Checkpoints with vision and audio are read for text only. "Unified" ones differ only in these parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import HeadShape, ModelConfig, MoeConfig
from kvmesh.engine.families.family import (
    SEEING_PREFIX,
    Family,
    types_or_each_nth,
    windows_of_types,
    with_ropes,
)
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_of

_FULL, _SLIDING = "full_attention", "sliding_attention"

_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("use_bidirectional_attention", "vision")
    types = types_or_each_nth(fields, config.num_layers, 6)
    # The last layer has full attention in transformers, whatever the file says.
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
    # transformers ignores the keys of features that unified checkpoints lack.
    without = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return _configure(Fields({**fields.raw, **without}, fields.origin), config)


def _full_heads(fields: Fields, config: ModelConfig, types: tuple[str, ...]) -> HeadShape:
    """Returns the heads of layers with full attention, from either of the two kinds of keys."""
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
    """Returns the entry of `per_layer_config` that all layers of a type share."""
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
    """Returns each layer's KV source: the last layers reuse the last earlier one of their type."""
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
        # The dense MLP, which all rows use.
        shared_size=config.intermediate_size,
    )


FAMILY = Family(
    _configure,
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
