"""Command R, R7B and A: attention and MLP side by side behind one norm, which subtracts the mean;
the second version has windows in most layers and rotates in those alone.

A part's mean is taken out of it before it is added to the stream. The stream then has none, and its
norms are those of other families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvmesh.engine.attention import load_attention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import DENSE_MLP, Mixer, Mlp, Step, load_gated_mlp
from kvmesh.engine.models.family import (
    Family,
    types_or_each_nth,
    unrotated_without_window,
    windows_of_types,
)
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels import layer_ops


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("use_gated_activation", True)
    fields.only("use_parallel_block", True)
    fields.only("use_qk_norm", False)
    scale = fields.number("logit_scale", float, default=0.0625)
    return replace(config, interleaved=True, logit_scale=scale)


def _configure_v2(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("head_dim", config.hidden_size // config.num_heads)
    windows = windows_of_types(fields, types_or_each_nth(fields, config.num_layers, 4))
    return unrotated_without_window(replace(_configure(fields, config), windows=windows))


@dataclass(frozen=True, slots=True)
class _ParallelLayer:
    """Norm, then attention and MLP of what it gave."""

    norm: Tensor
    mixer: Mixer
    mlp: Mlp
    eps: float

    def run(
        self, x: Tensor, delta: Tensor | None, step: Step, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Layer.run`."""
        if delta is None:
            x = _centred(x)
        h = layer_ops.add_rms_norm(x, delta, self.norm, self.eps)
        part = self.mixer.run(h, step, keep)
        if keep is not None:
            x, h = x[keep], h[keep]
        return x, _centred(part + self.mlp.run(h))


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(dim=-1, keepdim=True)


def _load_layer(weights: LayerWeights, config: ModelConfig) -> _ParallelLayer:
    hidden = config.hidden_size
    return _ParallelLayer(
        norm=weights.vector("input_layernorm.weight", hidden),
        mixer=load_attention(weights, config),
        mlp=load_gated_mlp(weights, DENSE_MLP, hidden, config.intermediate_size),
        eps=config.rms_norm_eps,
    )


_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
_ALIASES = (("layer_norm_eps", "rms_norm_eps"),)
V1 = Family(_configure, _load_layer, _DEFAULTS, rope_theta=500000.0, aliases=_ALIASES)
V2 = Family(_configure_v2, _load_layer, _DEFAULTS | {"sliding_window": 4096}, aliases=_ALIASES)
