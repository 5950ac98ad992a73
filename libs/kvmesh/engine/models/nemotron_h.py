"""Layers of Nemotron-H; see families/nemotron_h.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig, MoeConfig
from kvmesh.engine.experts import ExactRouter, GroupRoute
from kvmesh.engine.layers import GatedMlp, Mixer, Mlp, SparseMlp, Step, make_sparse_mlp
from kvmesh.engine.mamba import load_mamba
from kvmesh.engine.plain_mlp import PlainMlp, load_plain_mlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops, reference
from kvmesh.kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class _MixerLayer:
    """Layer that is a norm and a mixer."""

    norm: Tensor
    mixer: Mixer
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.norm, self.eps)
        return x if keep is None else x[keep], self.mixer.run(h, step, keep)


@dataclass(frozen=True, slots=True)
class _MlpLayer:
    """Layer that is a norm and an MLP."""

    norm: Tensor
    mlp: Mlp
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        h = layer_ops.add_rms_norm(x, delta, self.norm, self.eps)
        if keep is not None:
            x, h = x[keep], h[keep]
        return x, self.mlp.run(h)


@dataclass(frozen=True, slots=True)
class _Experts:
    """Routed experts plus one shared expert.

    Attributes:
        down, up: projections to the routed experts' input and from their output; None if these
            have the stream's size.
    """

    chosen: SparseMlp
    common: PlainMlp
    down: Linear | None
    up: Linear | None

    def run(self, h: Tensor) -> Tensor:
        """See `Mlp.run`."""
        weights, chosen = self.chosen.route(self.chosen.router(h))
        mixed = self.chosen.mix(h if self.down is None else self.down(h), weights, chosen)
        if self.up is not None:
            mixed = self.up(mixed)
        return mixed + self.common.run(h)


def load_layer(weights: LayerWeights, config: ModelConfig) -> _MixerLayer | _MlpLayer:
    """See `LoadLayer`."""
    norm, eps = weights.vector("norm.weight", config.hidden_size), config.rms_norm_eps
    if config.is_linear(weights.layer):
        return _MixerLayer(norm, load_mamba(weights, config), eps)
    if weights.layer not in config.mlp_only:
        return _MixerLayer(norm, load_attention(weights, config), eps)
    moe = config.moe
    if moe is None or weights.layer not in moe.sparse_layers:
        return _MlpLayer(norm, load_plain_mlp(weights, config, reference.squared_relu), eps)
    return _MlpLayer(norm, _load_experts(weights, config, moe), eps)


def _load_experts(weights: LayerWeights, config: ModelConfig, moe: MoeConfig) -> _Experts:
    hidden, latent = config.hidden_size, moe.latent_size
    bias = weights.exact("mlp.gate.e_score_correction_bias", (moe.num_experts,))
    route = GroupRoute(moe.top_k, moe.num_groups, moe.top_groups, moe.normalize, moe.scale, bias)
    router = ExactRouter(weights.exact("mlp.gate.weight", (moe.num_experts, hidden)))
    common = replace(config, intermediate_size=moe.shared_size)
    names = ("mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")
    down = up = None
    if latent:
        down = weights.linear("mlp.fc1_latent_proj.weight", latent, hidden)
        up = weights.linear("mlp.fc2_latent_proj.weight", hidden, latent)
    return _Experts(
        chosen=make_sparse_mlp(router, route, _load_chosen(weights, moe, latent or hidden)),
        common=load_plain_mlp(weights, common, reference.squared_relu, names),
        down=down,
        up=up,
    )


def _load_chosen(weights: LayerWeights, moe: MoeConfig, width: int) -> list[GatedMlp]:
    """Reads experts without a gate.

    Args:
        width: size of their input and output.
    """
    size = moe.intermediate_size
    return [
        GatedMlp(
            weights.linear(f"mlp.experts.{expert}.up_proj.weight", size, width),
            weights.linear(f"mlp.experts.{expert}.down_proj.weight", width, size),
            reference.squared_relu,
        )
        for expert in range(moe.num_experts)
    ]
