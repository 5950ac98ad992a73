"""Granite 3 with experts in all layers, whose weights are stacked in two tensors."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.granite import scaled
from kvmesh.engine.json_fields import Fields


def with_experts(fields: Fields, config: ModelConfig, *, shared_size: int = 0) -> ModelConfig:
    """Returns a config with the four factors, and experts in all layers.

    Args:
        shared_size: intermediate size of the shared expert; 0 for none.

    Raises:
        CheckpointError: a value is malformed.
    """
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int, default=8),
        top_k=fields.number("num_experts_per_tok", int, default=2),
        intermediate_size=config.intermediate_size,
        # A softmax over the chosen scores equals one over all scores, normalised to sum to 1.
        normalize=True,
        sparse_layers=frozenset(range(config.num_layers)),
        shared_size=shared_size,
    )
    return replace(scaled(fields, config), moe=moe)


EXPERT_NAMES = (
    (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".mlp.gate.", ".block_sparse_moe.router.layer."),
)
"""Parts of tensor names of experts and their router, with the family's names."""

FAMILY = Family(with_experts, tensor_names=EXPERT_NAMES)
