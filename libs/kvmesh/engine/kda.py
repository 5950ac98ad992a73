"""Delta attention with a decay per channel (KDA): the parts that its families share.

Source: Kimi Linear, arXiv 2510.26692. Tests: tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.linear_attention import DeltaAttention, DeltaInputs, load_taps
from kvmesh.engine.weights import LayerWeights


def load_kda(
    weights: LayerWeights, config: ModelConfig, project: Callable[[Tensor], DeltaInputs]
) -> DeltaAttention:
    """Reads one layer; the caller has read the input projections.

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
