"""Parts of mixtures of experts that several families share: shared experts, choice within groups.

Tests: tests/unit/engine/test_experts.py, tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import (
    GatedMlp,
    Mlp,
    SparseMlp,
    load_gated_mlp,
    make_sparse_mlp,
)
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """Experts that rows choose, and one that all rows take.

    Attributes:
        gate: to one value per row, whose sigmoid is the share of the common expert; None for 1.
    """

    chosen: SparseMlp
    common: GatedMlp
    gate: Linear | None = None

    def run(self, h: Tensor) -> Tensor:
        """See `Mlp.run`."""
        common = self.common.run(h)
        if self.gate is not None:
            common = common * torch.sigmoid(self.gate(h))
        return self.chosen.run(h).add_(common)


@dataclass(frozen=True, slots=True)
class ExactRouter:
    """Scores of experts in fp32, whatever the model computes in.

    Attributes:
        weight: [experts, hidden] fp32.
    """

    weight: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """[rows, hidden] to [rows, experts] fp32."""
        return functional.linear(h.float(), self.weight)


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """Choice of experts from the best groups of experts only.

    Attributes:
        bias: [experts] fp32, added for the choice but not to the weights; None for softmax
            scores, whose groups count by their best expert instead of their best two.
        scale: factor of the weights.

    Source: DeepSeek-V3, arXiv 2412.19437 §2.1.2; DeepSeek-V2, arXiv 2405.04434 §2.2.2.
    """

    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float
    bias: Tensor | None = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, experts] to weights and expert ids, both [rows, top_k]."""
        if self.bias is None:
            scores = choice = torch.softmax(logits.float(), dim=-1)
        else:
            scores = torch.sigmoid(logits.float())
            choice = scores + self.bias
        if self.num_groups > 1:
            choice = self._only_best_groups(choice)
        experts = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts

    def _only_best_groups(self, choice: Tensor) -> Tensor:
        grouped = choice.view(len(choice), self.num_groups, choice.shape[1] // self.num_groups)
        counting = 1 if self.bias is None else 2
        strength = grouped.topk(counting, dim=-1).values.sum(-1)
        best = strength.topk(self.top_groups, dim=-1).indices
        open_groups = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, best, value=True)
        return grouped.masked_fill(~open_groups[..., None], -torch.inf).view(choice.shape)


def load_experts(
    weights: LayerWeights, config: ModelConfig, prefix: str = "mlp.experts"
) -> tuple[GatedMlp, ...]:
    """Reads all experts of a layer by their usual names.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe = config.moe
    assert moe is not None
    return tuple(
        load_mlp(weights, f"{prefix}.{expert}", config.hidden_size, moe.intermediate_size)
        for expert in range(moe.num_experts)
    )


def load_mlp(weights: LayerWeights, prefix: str, hidden: int, size: int) -> GatedMlp:
    """Reads one gated MLP by its usual names.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    names = (
        f"{prefix}.gate_proj.weight",
        f"{prefix}.up_proj.weight",
        f"{prefix}.down_proj.weight",
    )
    return load_gated_mlp(weights, names, hidden, size)


def load_group_routed(weights: LayerWeights, config: ModelConfig) -> Mlp:
    """Reads the experts of DeepSeek and those who follow it.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    bias = None
    if moe.biased_choice:
        bias = weights.tensor("mlp.gate.e_score_correction_bias", (moe.num_experts,)).float()
    chosen = make_sparse_mlp(
        ExactRouter(weights.tensor("mlp.gate.weight", (moe.num_experts, hidden)).float()),
        GroupRoute(
            top_k=moe.top_k,
            num_groups=moe.num_groups,
            top_groups=moe.top_groups,
            normalize=moe.normalize,
            scale=moe.scale,
            bias=bias,
        ),
        load_experts(weights, config),
    )
    return SharedMlp(chosen, load_mlp(weights, "mlp.shared_experts", hidden, moe.shared_size))
