"""Delta attention with a decay per channel (KDA): the parts that its families share.

Source: Kimi Linear, arXiv 2510.26692. Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.linear_attention import DeltaAttention, DeltaInputs, load_taps
from kvmesh.engine.weights import LayerWeights


def sparse_layers(raw: Mapping[str, Any], num_layers: int, usual_dense: int) -> frozenset[int]:
    """Layers with experts: as the file lists them, or all behind the first few.

    Args:
        usual_dense: how many the first few are where the file does not say.
    """
    types = raw.get("mlp_layer_types")
    if types is None:
        return frozenset(range(int(raw.get("first_k_dense_replace", usual_dense)), num_layers))
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sparse")


def load_kda(
    weights: LayerWeights, config: ModelConfig, project: Callable[[Tensor], DeltaInputs]
) -> DeltaAttention:
    """Reads one layer, but for the input projections.

    Raises:
        CheckpointError: a tensor is missing or of the wrong shape.
    """
    shape = config.linear
    assert shape is not None
    values = shape.num_value_heads * shape.value_dim
    taps = [
        weights.tensor(f"self_attn.{name}_conv1d.weight", (values, 1, shape.conv_kernel))
        for name in "qkv"
    ]
    return DeltaAttention(
        project=project,
        taps=load_taps(torch.cat(taps)),
        norm=weights.vector("self_attn.o_norm.weight", shape.value_dim),
        activate=torch.sigmoid,
        output=weights.linear("self_attn.o_proj.weight", config.hidden_size, values),
        place=weights.place,
        shape=shape,
        eps=config.rms_norm_eps,
    )
