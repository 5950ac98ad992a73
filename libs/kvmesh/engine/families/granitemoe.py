"""Granite 3 with experts in all layers, whose weights are two tensors."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.granite import scaled
from kvmesh.engine.json_fields import Fields


def with_experts(fields: Fields, config: ModelConfig, *, shared_size: int = 0) -> ModelConfig:
    """A config with the four factors, and experts in all layers.

    Args:
        shared_size: of the expert that all rows take; 0 for none.

    Raises:
        CheckpointError: a value is malformed.
    """
    moe = MoeConfig(
        num_experts=fields.number("num_local_experts", int, default=8),
        top_k=fields.number("num_experts_per_tok", int, default=2),
        intermediate_size=config.intermediate_size,
        # A softmax over the chosen ones' scores is one over all, made to sum to 1.
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
"""Of the tensors of experts, and of what chooses them."""

FAMILY = Family(with_experts, tensor_names=EXPERT_NAMES)
