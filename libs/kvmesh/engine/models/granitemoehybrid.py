"""Granite 4 without Mamba layers (350M, 1B, Micro): Granite 3 with another name for the MLP, which
all rows take beside experts where there are some; rotated only where the file says so.
Granite 3 with experts and a shared one is the same, always rotated.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.attention import load_pre_norm_layer
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.experts import SharedMlp, load_softmax_routed
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import MixerLayer, load_joined_mlp
from kvmesh.engine.models.family import Family
from kvmesh.engine.models.granite import scaled
from kvmesh.engine.models.granitemoe import EXPERT_NAMES, with_experts
from kvmesh.engine.weights import LayerWeights


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    if fields.layer_types(config.num_layers) is None:
        raise CheckpointError(
            f"{fields.origin}: without layer_types all layers are Mamba's, which are not supported"
        )
    size = fields.number("shared_intermediate_size", int, default=1024)
    if fields.count("num_local_experts", default=8):
        config = with_experts(fields, config, shared_size=size)
    else:
        config = replace(scaled(fields, config), intermediate_size=size)
    if fields.raw.get("position_embedding_type") == "rope":
        return config
    return replace(config, unrotated=frozenset(range(config.num_layers)))


def _configure_shared(fields: Fields, config: ModelConfig) -> ModelConfig:
    size = fields.count("shared_intermediate_size", default=0)
    return with_experts(fields, config, shared_size=size)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> MixerLayer:
    moe = config.moe
    if moe is None:
        return load_pre_norm_layer(weights, config, load_joined_mlp(weights, config))
    chosen = load_softmax_routed(weights, config)
    if not moe.shared_size:
        return load_pre_norm_layer(weights, config, chosen)
    common = load_joined_mlp(weights, replace(config, intermediate_size=moe.shared_size))
    return load_pre_norm_layer(weights, config, SharedMlp(chosen, common))


FAMILY = Family(
    _configure,
    _load_layer,
    aliases=(("layers_block_type", "layer_types"),),
    tensor_names=(
        *EXPERT_NAMES,
        (".mlp.gate_up_proj.", ".shared_mlp.input_linear."),
        (".mlp.down_proj.", ".shared_mlp.output_linear."),
    ),
)
SHARED = replace(FAMILY, configure=_configure_shared, aliases=())
