"""Layers of Gemma 4; see families/gemma4.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional

from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import load_experts
from kvmesh.engine.layers import (
    DENSE_MLP,
    GatedMlp,
    Mixer,
    SparseMlp,
    Step,
    load_gated_mlp,
    make_sparse_mlp,
)
from kvmesh.engine.lent_attention import load_lent_attention
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops, reference
from kvmesh.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class _MixedMlp:
    """An MLP and experts in parallel, with norms around each; the caller norms the MLP's input.

    Attributes:
        router_norm: [hidden], norm of the router's input.
        expert_scale: [experts], factors of the chosen experts' weights.
    """

    mlp: GatedMlp
    mlp_norm: Tensor
    router_norm: Tensor
    experts_norm: Tensor
    experts: SparseMlp
    expert_scale: Tensor
    out_norm: Tensor
    eps: float

    def run(self, h: Tensor, x: Tensor) -> Tensor:
        """Maps [rows, hidden] of the normed stream, and of the stream, to the MLP's output."""
        common = reference.rms_norm(self.mlp.run(h), self.mlp_norm, self.eps)
        scores = self.experts.router(reference.rms_norm(x, self.router_norm, self.eps))
        weights, chosen = self.experts.route(scores.float())
        read = reference.rms_norm(x, self.experts_norm, self.eps)
        mixed = self.experts.mix(read, weights * self.expert_scale[chosen], chosen)
        return common + reference.rms_norm(mixed, self.out_norm, self.eps)


@dataclass(frozen=True, slots=True)
class _Told:
    """The part of a layer that reads its per-layer embeddings.

    Attributes:
        layer: index of the layer.
    """

    layer: int
    gate: Linear
    project: Linear
    norm: Tensor
    eps: float

    def run(self, x: Tensor, told: Tensor) -> Tensor:
        """Maps the stream [rows, hidden] and embeddings [rows, size] to [rows, hidden]."""
        part = functional.gelu(self.gate(x), approximate="tanh") * told
        return reference.rms_norm(self.project(part), self.norm, self.eps)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Layer with norms around attention and MLP, then per-layer embeddings, then a factor."""

    input_norm: Tensor
    mixer: Mixer
    post_mixer_norm: Tensor
    pre_mlp_norm: Tensor
    mlp: GatedMlp | _MixedMlp
    post_mlp_norm: Tensor
    eps: float
    told: _Told | None
    factor: Tensor

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.input_norm, self.eps)
        h = self.mixer.run(h, step, keep)
        delta = layer_ops.add_rms_norm(h, None, self.post_mixer_norm, self.eps)
        if keep is not None:
            x = x[keep]
        h = layer_ops.add_rms_norm(x, delta, self.pre_mlp_norm, self.eps)
        out = self.mlp.run(h, x) if isinstance(self.mlp, _MixedMlp) else self.mlp.run(h)
        part = layer_ops.add_rms_norm(out, None, self.post_mlp_norm, self.eps)
        if self.told is not None:
            assert step.layer_inputs is not None, "the step tells layers nothing"
            told = step.layer_inputs[:, self.told.layer]
            x += part
            part = self.told.run(x, told if keep is None else told[keep])
        x *= self.factor
        return x, part * self.factor


def load_layer(weights: LayerWeights, config: ModelConfig) -> _Layer:
    """See `LoadLayer`."""
    hidden, size = config.hidden_size, config.intermediate_size
    if config.wide_readers and config.kv_source(weights.layer) != weights.layer:
        size *= 2
    mlp = load_gated_mlp(weights, DENSE_MLP, hidden, size, reference.gelu_and_mul)

    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}_layernorm.weight", hidden)

    return _Layer(
        input_norm=norm("input"),
        mixer=load_lent_attention(weights, config),
        post_mixer_norm=norm("post_attention"),
        pre_mlp_norm=norm("pre_feedforward"),
        mlp=mlp if config.moe is None else _load_mixed(weights, config, config.moe, mlp),
        post_mlp_norm=norm("post_feedforward"),
        eps=config.rms_norm_eps,
        told=_load_told(weights, config) if config.layer_input_size else None,
        factor=weights.vector("layer_scalar", 1),
    )


def _load_mixed(
    weights: LayerWeights, config: ModelConfig, moe: MoeConfig, mlp: GatedMlp
) -> _MixedMlp:
    hidden = config.hidden_size
    scale = weights.exact("router.scale", (hidden,)) * hidden**-0.5

    def norm(name: str) -> Tensor:
        return weights.vector(f"{name}.weight", hidden)

    return _MixedMlp(
        mlp=mlp,
        mlp_norm=norm("post_feedforward_layernorm_1"),
        router_norm=scale.to(weights.dtype),
        experts_norm=norm("pre_feedforward_layernorm_2"),
        experts=make_sparse_mlp(
            weights.linear("router.proj.weight", moe.num_experts, hidden),
            partial(layer_ops.route, top_k=moe.top_k, normalize=True),
            load_experts(weights, config, "experts", activation=reference.gelu_and_mul),
        ),
        expert_scale=weights.exact("router.per_expert_scale", (moe.num_experts,)),
        out_norm=norm("post_feedforward_layernorm_2"),
        eps=config.rms_norm_eps,
    )


def _load_told(weights: LayerWeights, config: ModelConfig) -> _Told:
    hidden, size = config.hidden_size, config.layer_input_size
    return _Told(
        layer=weights.layer,
        gate=weights.linear("per_layer_input_gate.weight", size, hidden),
        project=weights.linear("per_layer_projection.weight", hidden, size),
        norm=weights.vector("post_per_layer_input_norm.weight", hidden),
        eps=config.rms_norm_eps,
    )
