"""Reads the architecture of a checkpoint from a Hugging Face folder.

The files in families/ interpret a family's own keys. Tests: tests/unit/engine/test_config.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families import FAMILIES
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields, read_json, read_json_if_any
from kvmesh.engine.rope_fields import refuse_wrong_factors, rope_of, rotary_dim

SUPPORTED = "docs/adding-a-model.md lists what is"
_UNSUPPORTED_KEYS = (
    "quantization_config",
    "mlp_bias",
    "use_bias",
    "use_qkv_bias",
    "clip_qkv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)


def load_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and generation_config.json of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed, or the architecture is not supported.
    """
    path = folder / "config.json"
    raw = read_json(path)
    generation = read_json_if_any(folder / "generation_config.json")
    return parse_model_config(raw, generation, origin=str(path))


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, origin: str
) -> ModelConfig:
    """Turns the parsed JSON files into a config.

    Args:
        origin: file name for error messages.

    Raises:
        CheckpointError: a key is missing, has the wrong type, or requests an unsupported feature.
    """
    name = raw.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise CheckpointError(f"{origin}: {_unsupported(name)}")
    raw = family.usual_keys(raw, origin)
    _refuse_unsupported(raw, family, origin)
    fields = Fields(raw, origin)
    hidden_size = fields.number("hidden_size", int)
    num_layers = fields.number("num_hidden_layers", int)
    num_heads = fields.number("num_attention_heads", int)
    num_kv_heads = fields.number("num_key_value_heads", int, default=num_heads)
    head_dim = fields.number("head_dim", int, default=hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"{origin}: {num_heads} heads, {num_kv_heads} KV heads and head size {head_dim} "
            "do not fit together"
        )
    bias = fields.flag("attention_bias")
    has_experts_only = raw.get("intermediate_size") is None
    config = ModelConfig(
        family=str(name),
        vocab_size=fields.number("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=0 if has_experts_only else fields.number("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", float, default=1e-6),
        rope=rope_of(fields, family.rope_theta, "full_attention"),
        max_position_embeddings=fields.number("max_position_embeddings", int),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=False,
        dtype=fields.dtype(),
        eos_token_ids=fields.eos_ids() | Fields(generation, origin).eos_ids(),
        attention_scale=head_dim**-0.5,
        windows=(0,) * num_layers,
    )
    configured = family.configure(fields, config)
    _refuse_uncomputed(fields, configured)
    refuse_wrong_factors(configured, origin)
    _refuse_impossible_experts(fields, configured.moe)
    return configured


def _unsupported(name: object) -> str:
    """Returns one line about an unknown family, with similar names instead of all 80 and more."""
    if not isinstance(name, str):
        return f"model_type is {name!r} and names no family of models; take another copy of it"
    near = difflib.get_close_matches(name, FAMILIES, n=3)
    others = f"{' and '.join(near)} would be; " if near else ""
    return (
        f"model_type {name!r} is not supported; {others}docs/adding-a-model.md lists the "
        f"{len(FAMILIES)} that are"
    )


def _refuse_uncomputed(fields: Fields, config: ModelConfig) -> None:
    """Refuses features of the file that the family does not compute."""
    origin, name = fields.origin, config.family
    types = fields.layer_types(config.num_layers) or ()
    linear = config.linear
    computed = dict.fromkeys(types, False) | {
        "full_attention": True,
        "sliding_attention": any(config.windows),
        "linear_attention": linear is not None and not linear.is_convolution,
        "conv": linear is not None and linear.is_convolution,
        "mlp": bool(config.mlp_only),
        "moe": bool(config.mlp_only) and config.moe is not None,
    }
    for kind, is_computed in computed.items():
        if kind in types and not is_computed:
            text = f"{origin}: layer type {kind} is not supported in {name}; {SUPPORTED}"
            raise CheckpointError(text)
    if not any(map(config.has_attention, range(config.num_layers))):
        raise CheckpointError(f"{origin}: layer_types without an attention layer are not supported")
    if config.rope.kind == "proportional" and config.local_rope is None:
        raise CheckpointError(f"{origin}: rope_type {config.rope.kind} is not supported in {name}")
    if rotary_dim(fields, config.head_dim) != config.head_dim and not config.rotary_dim:
        text = f"{origin}: partial_rotary_factor is not supported in {name}; {SUPPORTED}"
        raise CheckpointError(text)


def _refuse_impossible_experts(fields: Fields, moe: MoeConfig | None) -> None:
    """Refuses expert settings that no row could satisfy."""
    if moe is None:
        return
    origin, experts, groups = fields.origin, moe.num_experts, moe.num_groups
    if moe.top_k > experts:
        raise CheckpointError(f"{origin}: num_experts_per_tok is {moe.top_k} of {experts} experts")
    if moe.top_groups > groups:
        raise CheckpointError(f"{origin}: topk_group is {moe.top_groups} of n_group, {groups}")
    if groups == 1:
        return
    if experts % groups or experts < groups * (2 if moe.biased_choice else 1):
        raise CheckpointError(f"{origin}: n_group is {groups} for {experts} experts")
    if moe.top_groups * experts // groups < moe.top_k:
        raise CheckpointError(
            f"{origin}: topk_group is {moe.top_groups} of n_group, {groups}, which have fewer "
            f"experts than num_experts_per_tok, {moe.top_k}"
        )


def _refuse_unsupported(raw: Mapping[str, Any], family: Family, origin: str) -> None:
    names = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
    known = " or ".join(map(repr, family.activations))
    found = [
        f"{key} {raw[key]!r} (only {known} here)"
        for key in names
        if raw.get(key) not in (None, *family.activations)
    ]
    refused = set(_UNSUPPORTED_KEYS) - family.computed_keys
    found += [key for key in _UNSUPPORTED_KEYS if key in refused and raw.get(key)]
    if found:
        raise CheckpointError(f"{origin}: {'; '.join(found)} is not supported; {SUPPORTED}")
