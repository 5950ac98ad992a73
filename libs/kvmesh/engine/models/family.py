"""What a model family tells the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layers import Layer
from kvmesh.engine.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Family:
    """One family's own part.

    Attributes:
        configure: config.json and the config that every family shares, to the family's config.
        load_layer: reads one layer.
        head_dim: where config.json may leave it out; None for hidden size over heads.
        rope_theta: where config.json may leave it out.
        activation: the only name of it that is supported.
        ties_embeddings: where config.json may leave it out.
        scales_embeddings: embeddings are multiplied by the root of the hidden size.
        norm_offset: added to the weights of norms.
    """

    configure: Callable[[Fields, ModelConfig], ModelConfig]
    load_layer: Callable[[LayerWeights, ModelConfig], Layer]
    head_dim: int | None = None
    rope_theta: float = 10000.0
    activation: str = "silu"
    ties_embeddings: bool = False
    scales_embeddings: bool = False
    norm_offset: float = 0.0


def uniform_window(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """`windows` of a model whose layers all have the same one, or none where the key is null."""
    if fields.raw.get("sliding_window") is None:
        return config.windows
    return (fields.number("sliding_window", int),) * config.num_layers


def windows_of_types(fields: Fields, types: tuple[str, ...]) -> tuple[int, ...]:
    """`windows` from the type of each layer.

    Raises:
        CheckpointError: a layer slides and the window is missing.
    """
    if "sliding_attention" not in types:
        return (0,) * len(types)
    window = fields.number("sliding_window", int)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def qwen_windows(fields: Fields, config: ModelConfig) -> tuple[int, ...]:
    """`windows` of Qwen2 and Qwen3: none unless asked for, and then in the upper layers."""
    if not fields.flag("use_sliding_window"):
        return config.windows
    types = fields.layer_types(config.num_layers)
    if types is not None:
        return windows_of_types(fields, types)
    window = fields.number("sliding_window", int, default=4096)
    lower = min(int(fields.raw.get("max_window_layers", 28)), config.num_layers)
    return (0,) * lower + (window,) * (config.num_layers - lower)
