"""SmolLM3: Llama whose queries and keys are not rotated in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family, windows_of_types
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    unrotated = _unrotated(fields, config.num_layers)
    windows = config.windows
    if fields.flag("use_sliding_window"):
        types = fields.layer_types(config.num_layers)
        if types is None and fields.raw.get("sliding_window") is not None:
            types = tuple(
                "sliding_attention" if layer in unrotated else "full_attention"
                for layer in range(config.num_layers)
            )
        if types is not None:
            windows = windows_of_types(fields, types)
    return replace(config, unrotated=unrotated, windows=windows)


def _unrotated(fields: Fields, num_layers: int) -> frozenset[int]:
    """Returns the layers without rotation: as flagged in the file, or each n-th."""
    if fields.raw.get("no_rope_layers") is None:
        every = fields.number("no_rope_layer_interval", int, default=4)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % every == 0)
    rotates = fields.numbers("no_rope_layers")
    if len(rotates) < num_layers:
        raise CheckpointError(
            f"{fields.origin}: {len(rotates)} no_rope_layers for {num_layers} layers"
        )
    # Despite its name the list has 1 for a layer that is rotated.
    return frozenset(layer for layer in range(num_layers) if not rotates[layer])


FAMILY = Family(_configure, {"tie_word_embeddings": True}, rope_theta=2e6)
