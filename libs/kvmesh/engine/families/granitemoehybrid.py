"""Granite 4: Granite 3 with Mamba-2 in most layers of the H models, and another name for the MLP,
which all rows use beside experts, if there are any. It is rotated only if the file says so. Granite
3 with experts and a shared one is the same without Mamba, always rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import LinearConfig, ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.granite import scaled
from kvmesh.engine.families.granitemoe import EXPERT_NAMES, with_experts
from kvmesh.engine.families.mamba_fields import mamba_shape
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # The factors change only the epsilon of the stream's norms.
    config = replace(config, linear=_mamba(fields, config), state_norm_eps=config.rms_norm_eps)
    size = fields.number("shared_intermediate_size", int, default=1024)
    if fields.count("num_local_experts", default=8):
        config = with_experts(fields, config, shared_size=size)
    else:
        config = replace(scaled(fields, config), intermediate_size=size)
    if fields.raw.get("position_embedding_type") == "rope":
        return config
    return replace(config, unrotated=frozenset(range(config.num_layers)))


def _mamba(fields: Fields, config: ModelConfig) -> LinearConfig | None:
    """Returns the shape of Mamba layers; None if there are none."""
    types = fields.layer_types(config.num_layers) or ("linear_attention",) * config.num_layers
    layers = frozenset(layer for layer, kind in enumerate(types) if kind == "linear_attention")
    if not layers:
        return None
    values = fields.number("mamba_expand", int, default=2) * config.hidden_size
    return mamba_shape(fields, layers, values)


def _configure_shared(fields: Fields, config: ModelConfig) -> ModelConfig:
    size = fields.count("shared_intermediate_size", default=0)
    return with_experts(fields, config, shared_size=size)


FAMILY = Family(
    _configure,
    aliases=(("layers_block_type", "layer_types"),),
    tensor_names=(
        *EXPERT_NAMES,
        (".mlp.gate_up_proj.", ".shared_mlp.input_linear."),
        (".mlp.down_proj.", ".shared_mlp.output_linear."),
    ),
)

SHARED = replace(FAMILY, configure=_configure_shared, aliases=())
