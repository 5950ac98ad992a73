"""Reads Mamba-2 layers from config.json, by the keys that Bamba and similar families share."""

from __future__ import annotations

import math

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import LinearConfig
from kvmesh.engine.json_fields import Fields


def only_free_durations(fields: Fields) -> None:
    """Refuses limits of the time step between two positions.

    Raises:
        CheckpointError: there are limits.
    """
    # The last form is how transformers writes infinity, for which JSON has no number.
    no_limits = [0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}]
    fields.only("time_step_limit", *no_limits)


def mamba_shape(fields: Fields, layers: frozenset[int], values: int) -> LinearConfig:
    """Returns the shape of these layers.

    Args:
        values: number of values of all heads at one position.

    Raises:
        CheckpointError: a value is malformed or not supported.
    """
    fields.only("mamba_conv_bias", True)
    fields.only("mamba_proj_bias", False)
    only_free_durations(fields)
    heads = fields.number("mamba_n_heads", int, default=128)
    groups = fields.number("mamba_n_groups", int, default=1)
    is_said = fields.raw.get("mamba_d_head") not in (None, "auto")
    size = fields.number("mamba_d_head", int) if is_said else values // heads
    if heads * size != values or heads % groups:
        raise CheckpointError(
            f"{fields.origin}: mamba_n_heads {heads}, mamba_n_groups {groups} and mamba_d_head "
            f"{size} do not fit together, or not mamba_expand or mamba_d_ssm: {values} values"
        )
    return LinearConfig(
        layers=layers,
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=fields.number("mamba_d_state", int, default=256),
        value_dim=size,
        conv_kernel=fields.number("mamba_d_conv", int, default=4),
    )
