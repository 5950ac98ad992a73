"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: every layer is one part after one norm: Mamba-2,
attention without rotation, an MLP with squared ReLU, or experts with it.

The time steps of Mamba-2 have no lower limit, as in training and in the decode steps of
transformers. For prompts transformers raises time steps to `time_step_min`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import LinearConfig, ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.mamba_fields import only_free_durations
from kvmesh.engine.json_fields import Fields

_BY_LETTER = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the type of each layer, one letter each in older files, and the number of layers."""
    types = raw.get("layer_types")
    pattern = raw.get("hybrid_override_pattern")
    if types is None and isinstance(pattern, str):
        types = [_BY_LETTER.get(letter, letter) for letter in pattern]
    if types is None:
        types = list(_BY_LETTER.values())
    if not isinstance(types, list):
        return {}
    return {"layer_types": types, "num_hidden_layers": len(types)}


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("mamba_hidden_act", "silu")
    fields.only("mamba_proj_bias", False)
    fields.only("residual_in_fp32", False)
    fields.only("sliding_window", None)
    fields.only("use_conv_bias", True)
    only_free_durations(fields)
    types = fields.layer_types(config.num_layers) or ()

    def layers(*kinds: str) -> frozenset[int]:
        return frozenset(layer for layer, kind in enumerate(types) if kind in kinds)

    eps = fields.number("layer_norm_epsilon", float, default=1e-5)
    return replace(
        config,
        rms_norm_eps=eps,
        state_norm_eps=eps,
        unrotated=frozenset(range(config.num_layers)),
        gated_mlp=False,
        mlp_only=layers("mlp", "moe"),
        linear=_mamba(fields, layers("linear_attention")),
        moe=_experts(fields, layers("moe")),
    )


def _mamba(fields: Fields, layers: frozenset[int]) -> LinearConfig | None:
    if not layers:
        return None
    groups = fields.number("n_groups", int, default=8)
    heads = fields.number("mamba_num_heads", int, default=128)
    if heads % groups:
        raise CheckpointError(
            f"{fields.origin}: mamba_num_heads {heads} and n_groups {groups} do not fit together"
        )
    return LinearConfig(
        layers=layers,
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=fields.number("ssm_state_size", int, default=128),
        value_dim=fields.number("mamba_head_dim", int, default=64),
        conv_kernel=fields.number("conv_kernel", int, default=4),
    )


def _experts(fields: Fields, layers: frozenset[int]) -> MoeConfig | None:
    if not layers:
        return None
    # transformers computes one shared expert, whatever the file says.
    fields.only("n_shared_experts", 1)
    return MoeConfig(
        num_experts=fields.number("n_routed_experts", int, default=8),
        top_k=fields.number("num_experts_per_tok", int, default=2),
        intermediate_size=fields.number("moe_intermediate_size", int, default=7688),
        normalize=fields.flag("norm_topk_prob", default=True),
        sparse_layers=layers,
        shared_size=fields.number("moe_shared_expert_intermediate_size", int, default=7688),
        num_groups=fields.number("n_group", int, default=1),
        top_groups=fields.number("topk_group", int, default=1),
        scale=fields.number("routed_scaling_factor", float, default=1.0),
        biased_choice=True,
        latent_size=fields.count("moe_latent_size", default=0),
    )


FAMILY = Family(
    _configure,
    {
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
    },
    activations=("relu2",),
    aliases=(
        ("layers_block_type", "layer_types"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_dt_limit", "time_step_limit"),
        ("mamba_n_groups", "n_groups"),
    ),
    weight_prefix="backbone",
    tensor_names=(
        (".embed_tokens.", ".embeddings."),
        ("backbone.norm.", "backbone.norm_f."),
        ("model.norm.", "model.norm_f."),
        (".mamba.", ".mixer."),
        (".self_attn.", ".mixer."),
        (".mlp.", ".mixer."),
    ),
    derived=_layers,
)
