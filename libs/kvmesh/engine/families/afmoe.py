"""Trinity (AFMoE): norms before and after attention and MLP and per head, gated attention, and
experts chosen by biased sigmoid scores beside shared ones. Layers without a window are not rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import (
    Family,
    types_or_each_nth,
    unrotated_without_window,
    windows_of_types,
)
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    windows = windows_of_types(fields, types_or_each_nth(fields, config.num_layers, 4))
    return replace(
        unrotated_without_window(replace(config, windows=windows)),
        qk_norm=True,
        embedding_scale=config.hidden_size**0.5 if fields.flag("mup_enabled") else 1.0,
        moe=_experts(fields, config.num_layers),
    )


def _experts(fields: Fields, num_layers: int) -> MoeConfig:
    # Keys of published files that transformers does not read.
    fields.only("n_group", 1)
    fields.only("route_norm", True)
    fields.only("score_func", "sigmoid")
    fields.only("topk_group", 1)
    size = fields.number("moe_intermediate_size", int, default=1408)
    return MoeConfig(
        num_experts=fields.number("num_experts", int, default=64),
        top_k=fields.number("num_experts_per_tok", int, default=6),
        intermediate_size=size,
        normalize=True,
        sparse_layers=frozenset(range(fields.count("num_dense_layers", 1), num_layers)),
        shared_size=size * fields.number("num_shared_experts", int, default=2),
        scale=fields.number("route_scale", float, default=1.0),
        biased_choice=True,
    )


FAMILY = Family(
    _configure,
    {
        "head_dim": 128,
        "intermediate_size": 6144,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "sliding_window": 1024,
    },
    aliases=(("global_attn_every_n_layers", "sliding_window_pattern"),),
    tensor_names=(
        (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.gate.weight", ".mlp.router.gate.weight"),
    ),
)
