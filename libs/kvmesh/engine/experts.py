"""Parts of mixture-of-experts layers that several families share.

Tests: tests/unit/engine/test_experts.py, tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.layers import (
    DENSE_MLP,
    GatedMlp,
    Mlp,
    SparseMlp,
    load_gated_mlp,
    make_sparse_mlp,
)
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops
from kvmesh.kernels.linear import Linear, make_linear


@dataclass(frozen=True, slots=True)
class SharedMlp:
    """Routed experts plus one shared expert.

    Attributes:
        gate: projection to one value per row, whose sigmoid scales the shared expert; None for 1.
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
    """Router that scores experts in fp32, whatever dtype the model computes in.

    Attributes:
        weight: [experts, hidden] fp32.
    """

    weight: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """[rows, hidden] to [rows, experts] fp32."""
        return functional.linear(h.float(), self.weight)


@dataclass(frozen=True, slots=True)
class GroupRoute:
    """Group-limited routing: chooses experts only from the best groups.

    Attributes:
        bias: [experts] fp32, added for the choice but not to the weights. Groups are ranked by
            their best two experts; without a bias (None) by their best one.
        scale: factor of the weights.
        is_softmax: scores are a softmax over all experts, not sigmoids.

    Source: DeepSeek-V3, arXiv 2412.19437 §2.1.2; DeepSeek-V2, arXiv 2405.04434 §2.2.2.
    """

    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float
    bias: Tensor | None = None
    is_softmax: bool = False

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, experts] to weights and expert ids, both [rows, top_k]."""
        exact = logits.float()
        scores = torch.softmax(exact, dim=-1) if self.is_softmax else torch.sigmoid(exact)
        choice = scores if self.bias is None else scores + self.bias
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


def experts_or_dense(
    weights: LayerWeights,
    config: ModelConfig,
    load_sparse: Callable[[LayerWeights, ModelConfig], Mlp],
) -> Mlp:
    """Reads a layer's experts, or its dense MLP by its usual names if it has no experts.

    Args:
        load_sparse: reads the experts.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    if config.moe is not None and weights.layer in config.moe.sparse_layers:
        return load_sparse(weights, config)
    return load_gated_mlp(weights, DENSE_MLP, config.hidden_size, config.intermediate_size)


GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")


def load_experts(
    weights: LayerWeights,
    config: ModelConfig,
    prefix: str = "mlp.experts",
    names: tuple[str, str, str] = GATE_UP_DOWN,
    activation: Callable[[Tensor], Tensor] = layer_ops.silu_and_mul,
) -> tuple[GatedMlp, ...]:
    """Reads all experts of a layer, stored one by one or stacked in two tensors.

    Args:
        names: names of an expert's gate, up and down projection.
        activation: activation of an expert, see `GatedMlp`.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    size = moe.intermediate_size
    if weights.has(f"{prefix}.gate_up_proj"):
        number, read = moe.num_experts, weights.transposed_or_not
        gate_up = read(f"{prefix}.gate_up_proj", (number, 2 * size, hidden))
        down = read(f"{prefix}.down_proj", (number, hidden, size))
        return tuple(
            GatedMlp(make_linear(inner), make_linear(outer), activation)
            for inner, outer in zip(gate_up, down, strict=True)
        )
    return tuple(
        load_mlp(weights, f"{prefix}.{expert}", hidden, size, names, activation)
        for expert in range(moe.num_experts)
    )


def load_mlp(
    weights: LayerWeights,
    prefix: str,
    hidden: int,
    size: int,
    names: tuple[str, str, str] = GATE_UP_DOWN,
    activation: Callable[[Tensor], Tensor] = layer_ops.silu_and_mul,
) -> GatedMlp:
    """Reads one gated MLP.

    Args:
        names: names of its gate, up and down projection.
        activation: see `GatedMlp`.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return load_gated_mlp(weights, (gate, up, down), hidden, size, activation)


def load_softmax_routed(
    weights: LayerWeights,
    config: ModelConfig,
    prefix: str = "mlp",
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> SparseMlp:
    """Reads experts routed by a softmax over all of them.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe = config.moe
    assert moe is not None
    return make_sparse_mlp(
        weights.linear(f"{prefix}.gate.weight", moe.num_experts, config.hidden_size),
        partial(layer_ops.route, top_k=moe.top_k, normalize=moe.normalize),
        load_experts(weights, config, f"{prefix}.experts", names),
    )


def load_gate_shared(weights: LayerWeights, config: ModelConfig) -> SharedMlp:
    """Reads the experts of the Qwen hybrids, whose shared expert is scaled by a gate.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    return SharedMlp(
        load_softmax_routed(weights, config),
        load_mlp(weights, "mlp.shared_expert", hidden, moe.shared_size),
        weights.linear("mlp.shared_expert_gate.weight", 1, hidden),
    )


def load_group_routed(
    weights: LayerWeights,
    config: ModelConfig,
    prefix: str = "mlp",
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Mlp:
    """Reads the experts of DeepSeek and of families with the same design.

    Args:
        names: names of a routed expert's gate, up and down projection; the shared expert has
            the usual ones.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe = config.moe
    assert moe is not None
    bias = None
    if moe.biased_choice:
        bias = weights.exact(f"{prefix}.gate.e_score_correction_bias", (moe.num_experts,))
    route = GroupRoute(
        top_k=moe.top_k,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        normalize=moe.normalize,
        scale=moe.scale,
        bias=bias,
        is_softmax=bias is None,
    )
    return load_routed(weights, config, route, prefix, names)


def load_routed(
    weights: LayerWeights,
    config: ModelConfig,
    route: GroupRoute,
    prefix: str = "mlp",
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> Mlp:
    """Reads experts whose scores are computed in fp32, and the shared expert if there is one.

    Args:
        names: see `load_group_routed`.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    router = ExactRouter(weights.exact(f"{prefix}.gate.weight", (moe.num_experts, hidden)))
    experts = load_experts(weights, config, f"{prefix}.experts", names)
    chosen = make_sparse_mlp(router, route, experts)
    if not moe.shared_size:
        return chosen
    return SharedMlp(chosen, load_mlp(weights, f"{prefix}.shared_experts", hidden, moe.shared_size))
