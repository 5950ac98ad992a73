"""Hunyuan, dense and with experts: queries and keys are rotated, then normalised per head."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, MoeConfig, RopeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_parameters


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(config, rope=_rope(fields, config))


def _rope(fields: Fields, config: ModelConfig) -> RopeConfig:
    """Reads the rotary embedding; "dynamic" with an `alpha` is this family's own kind."""
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
    """Returns the number of experts per row, which files may repeat for each layer."""
    said = fields.raw.get("num_experts_per_tok")
    if not isinstance(said, list):
        return fields.number("num_experts_per_tok", int, default=1)
    if len(set(map(repr, said))) != 1:
        raise CheckpointError(f"{fields.origin}: moe_topk must be the same for all layers")
    return Fields({"moe_topk": said[0]}, fields.origin).number("moe_topk", int)


_DEFAULTS = {"rms_norm_eps": 1e-5}

DENSE = Family(_configure, _DEFAULTS)

SPARSE = Family(
    _configure_experts,
    _DEFAULTS,
    aliases=(("moe_topk", "num_experts_per_tok"), ("num_local_experts", "num_experts")),
    tensor_names=(
        (".mlp.gate.weight", ".mlp.gate.wg.weight"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    ),
)
