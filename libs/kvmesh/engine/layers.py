"""Parts of decoder layers that all families share: MLPs, experts, and the usual layer order.

attention.py has the attention; a family's file in models/ combines the parts.
Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig, Rotation
from kvmesh.engine.kv_plan import KvPlace
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops, reference
from kvmesh.kernels.dispatch import StepAttention
from kvmesh.kernels.heads import RopeRows
from kvmesh.kernels.host_layer import AttentionCall, DecodeRows, MlpCall, takes
from kvmesh.kernels.latent import LatentMemory
from kvmesh.kernels.linear import Linear, make_linear
from kvmesh.kernels.states import States


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The KV that a step reads and writes.

    Attributes:
        attention: memory of each token group; empty if the groups keep latents.
        latent: memory of each token group that keeps latents.
        states: states of linear layers, or None.
    """

    attention: tuple[StepAttention, ...] = ()
    latent: tuple[LatentMemory, ...] = ()
    states: States | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Data of one step that all layers share.

    Attributes:
        memory: KV of all groups.
        ropes: rotary embeddings of the rows, one per rotation of the model's layers.
        query_factors: [rows, 1], factors of the rows' queries; None for 1.
        layer_inputs: [rows, layers, size], see `LayerInputs`; None without them.
        lent: keys and values of the rows that later layers reuse, by their place.
    """

    memory: StepMemory
    ropes: Mapping[Rotation, RopeRows]
    query_factors: Tensor | None = None
    layer_inputs: Tensor | None = None
    lent: dict[KvPlace, Tensor] = field(default_factory=dict)


class Layer(Protocol):
    """One decoder layer."""

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs the rows of a step.

        A layer returns its addition to the residual stream separately, so that the addition and
        the next norm are one pass.

        Args:
            x: [rows, hidden] residual stream without `delta`; changed in place.
            delta: [rows, hidden] to add first, or None.
            keep: [kept] int64, rows whose results after attention are wanted; None for all.

        Returns:
            The stream without this layer's addition, and the addition: [rows or kept, hidden].
        """
        ...


class Mixer(Protocol):
    """The part of a layer that mixes positions: attention or a substitute."""

    def run(self, h: Tensor, step: Step, keep: Tensor | None) -> Tensor:
        """Maps normalised [rows, hidden] to [rows or kept, hidden]."""
        ...


@runtime_checkable
class CallableMixer(Protocol):
    """A mixer that one native call on the CPU can compute together with the rest of its layer."""

    @property
    def call(self) -> AttentionCall | None:
        """The native call; None if the mixer needs several calls."""
        ...

    @property
    def reads(self) -> tuple[int, Rotation]:
        """Token group and rotation; mixers with equal ones share rows and rope."""
        ...

    def decode_rows(self, step: Step) -> DecodeRows | None:
        """Returns the rows of a step of decode rows only; else None."""
        ...

    def rope(self, step: Step) -> RopeRows:
        """Returns the rotary embedding of the rows."""
        ...


class Mlp(Protocol):
    """The part of a layer after attention."""

    def run(self, h: Tensor) -> Tensor:
        """Maps normalised [rows, hidden] to [rows, hidden] in new memory."""
        ...


# Prompt rows that an MLP computes at once on the CPU: intermediate results stay in the cache, and
# the allocator does not map new memory for every layer.
_CACHED_ROWS = 512


def by_cached_rows(compute: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    """Applies an MLP to [rows, hidden], on the CPU to `_CACHED_ROWS` rows at a time."""
    if h.is_cuda or len(h) <= _CACHED_ROWS:
        return compute(h)
    out = torch.empty_like(h)
    for first in range(0, len(h), _CACHED_ROWS):
        rows = slice(first, first + _CACHED_ROWS)
        out[rows] = compute(h[rows])
    return out


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gated MLP: the down projection of activated gates times ups.

    Attributes:
        gate_up: projection to [2 * intermediate], gates first; [intermediate] for an expert
            without a gate.
        activation: maps [rows, outputs of `gate_up`] to [rows, intermediate].
        call: native call for a few rows on the CPU; None if several calls are needed.
    """

    gate_up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    call: MlpCall | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.activation is layer_ops.silu_and_mul:
            object.__setattr__(self, "call", MlpCall.of(self.gate_up, self.down))

    def run(self, h: Tensor) -> Tensor:
        """See `Mlp.run`."""
        if self.call is not None and takes(h):
            return self.call.run(h)
        return by_cached_rows(lambda rows: self.down(self.activation(self.gate_up(rows))), h)


def load_gated_mlp(
    weights: LayerWeights,
    names: tuple[str, str, str],
    hidden_size: int,
    intermediate_size: int,
    activation: Callable[[Tensor], Tensor] = layer_ops.silu_and_mul,
) -> GatedMlp:
    """Reads an MLP.

    Args:
        names: names of the gate, up and down weights.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    gate, up, down = names
    gate_up = weights.stacked([(gate, intermediate_size), (up, intermediate_size)], hidden_size)
    return GatedMlp(
        make_linear(gate_up), weights.linear(down, hidden_size, intermediate_size), activation
    )


def load_joined_mlp(weights: LayerWeights, config: ModelConfig) -> GatedMlp:
    """Reads an MLP whose gate and up projections are one tensor in the files, gates first.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    return GatedMlp(
        weights.linear("mlp.gate_up_proj.weight", 2 * inner, hidden),
        weights.linear("mlp.down_proj.weight", hidden, inner),
        layer_ops.silu_and_mul,
    )


DENSE_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts stacked in two tensors, computed without waiting for their row counts.

    Attributes:
        gate_up: [experts, 2 * intermediate, hidden].
        down: [experts, hidden, intermediate].
        gate_up_bias, down_bias: [experts, outputs], or None.
    """

    gate_up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def run(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Maps [rows, hidden] with expert weights and ids [rows, top_k] to [rows, hidden]."""
        compute = self.by_kernels if h.is_cuda else self._by_torch
        # Sums in the order of the choices: scattered additions would round one by one, and on a
        # device in an order that differs from run to run.
        by_choice = compute(h, weights, chosen)
        return by_choice.view(*chosen.shape, h.shape[1]).sum(dim=1)

    def _by_torch(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Reference of `by_kernels` in torch."""
        experts = chosen.flatten()
        places = torch.arange(len(experts), device=h.device)
        inner = reference.chosen_product(h, self.gate_up, places // chosen.shape[1], experts)
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias[experts]
        out = reference.chosen_product(self.activation(inner), self.down, places, experts)
        if self.down_bias is not None:
            out = out + self.down_bias[experts]
        return (out * weights.flatten()[:, None]).to(h.dtype)

    def by_kernels(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Returns each choice's output for its row times its weight: [rows * top_k, hidden]."""
        # Triton costs half a second to import and is only needed where there is a device.
        from kvmesh.kernels.expert_tiles import plan_tiles  # noqa: PLC0415
        from kvmesh.kernels.grouped_gemm import grouped_gemm  # noqa: PLC0415

        tiles = plan_tiles(chosen, len(self.gate_up))
        top_k = chosen.shape[1]
        inner = grouped_gemm(h, self.gate_up, tiles, top_k=top_k, bias=self.gate_up_bias)
        active = self.activation(inner)
        return grouped_gemm(active, self.down, tiles, shares=weights, bias=self.down_bias)


def stacks_experts(weight: Tensor) -> bool:
    """Returns whether experts are stacked; the CPU reads only the weights of experts with rows."""
    return weight.is_cuda


def make_sparse_mlp(
    router: Callable[[Tensor], Tensor],
    route: Callable[[Tensor], tuple[Tensor, Tensor]],
    experts: Sequence[GatedMlp],
) -> SparseMlp:
    """Builds a mixture of experts, stacked if the device benefits."""
    first = experts[0]
    if not stacks_experts(first.gate_up.weight):
        return SparseMlp(router, route, tuple(experts))
    stacked = StackedExperts(
        torch.stack([each.gate_up.weight for each in experts]),
        torch.stack([each.down.weight for each in experts]),
        first.activation,
        _stacked_biases([each.gate_up.bias for each in experts]),
        _stacked_biases([each.down.bias for each in experts]),
    )
    return SparseMlp(router, route, (), stacked)


def _stacked_biases(biases: Sequence[Tensor | None]) -> Tensor | None:
    known = [each for each in biases if each is not None]
    return torch.stack(known) if known else None


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Mixture of experts: each row uses a few of them.

    Attributes:
        router: maps rows to scores of experts.
        route: maps scores [rows, experts] to weights and expert ids, both [rows, top_k].
        stacked: weights of all experts, for one launch instead of one per expert; or None.
    """

    router: Callable[[Tensor], Tensor]
    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    experts: tuple[GatedMlp, ...]
    stacked: StackedExperts | None = None

    def run(self, h: Tensor) -> Tensor:
        """See `Mlp.run`."""
        return self.mix(h, *self.route(self.router(h)))

    def mix(self, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Computes the weighted sum of the chosen experts of each row.

        The rows of one expert are one matrix product; experts without rows cost nothing.

        Args:
            h: [rows, inputs of an expert].
            weights, chosen: [rows, top_k], the second int64.

        Returns:
            [rows, outputs of an expert].
        """
        if self.stacked is not None:
            return self.stacked.run(h, weights, chosen)
        # Sorts rows by expert, so that each expert's rows are contiguous.
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        rows = order // chosen.shape[1]
        parts = torch.empty(len(order), h.shape[1], dtype=h.dtype)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                run = slice(first, first + count)
                parts[run] = expert.run(h[rows[run]])
                first += count
        places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        # One weighted sum over all expert outputs, instead of one addition per expert.
        return functional.embedding_bag(
            places.view(chosen.shape), parts, per_sample_weights=weights.to(h.dtype), mode="sum"
        )


@dataclass(frozen=True, slots=True)
class MixerLayer:
    """A layer in the Llama order: norm, attention or a substitute, norm, MLP."""

    input_norm: Tensor
    mixer: Mixer
    post_norm: Tensor
    mlp: Mlp
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.input_norm, self.eps)
        delta = self.mixer.run(h, step, keep)
        if keep is not None:
            x = x[keep]
        h = layer_ops.add_rms_norm(x, delta, self.post_norm, self.eps)
        return x, self.mlp.run(h)


def load_mixer_layer(
    weights: LayerWeights,
    config: ModelConfig,
    mixer: Mixer,
    mlp: Mlp,
    *,
    norm_offset: float = 0.0,
) -> MixerLayer:
    """Reads the norms of a layer by their usual names.

    Args:
        norm_offset: value added to the norm weights.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    hidden = config.hidden_size
    return MixerLayer(
        input_norm=weights.vector("input_layernorm.weight", hidden, norm_offset),
        mixer=mixer,
        post_norm=weights.vector("post_attention_layernorm.weight", hidden, norm_offset),
        mlp=mlp,
        eps=config.rms_norm_eps,
    )
