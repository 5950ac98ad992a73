"""Reads the rotary embeddings from a checkpoint's config.json.

Accepts the key of transformers 5 (`rope_parameters`) and the older ones (`rope_theta`,
`rope_scaling`). Torch-free. Tests: tests/unit/engine/test_config.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.json_fields import Fields

_KINDS = (
    "default",
    "dynamic",
    "linear",
    "llama3",
    "longrope",
    "mrope",
    "proportional",
    "su",
    "yarn",
)
_ORIGINAL = "original_max_position_embeddings"


def rope_of(
    fields: Fields, default_theta: float = 10000.0, layer_type: str | None = None
) -> RopeConfig:
    """Reads the rotary embedding, of one layer type if the file has several.

    Raises:
        CheckpointError: a value is malformed or the kind is not supported.
    """
    table = rope_parameters(fields)
    if layer_type is not None and layer_type in table:
        table = Fields(table, fields.origin).table(layer_type)
        # transformers does not read this key in a layer type's table.
        Fields(table, fields.origin).only("truncate", True)
    table = {"rope_theta": fields.raw.get("rope_theta"), **table}
    max_positions = fields.number("max_position_embeddings", int)
    return _rope_of_kind(Fields(table, fields.origin), default_theta, max_positions)


def rotary_dim(fields: Fields, head_dim: int, default: float = 1.0) -> int:
    """Returns the number of elements of a head that are rotated.

    Raises:
        CheckpointError: the fraction is not a number, or leaves half a pair.
    """
    key = "partial_rotary_factor"
    parameters = rope_parameters(fields)
    of_types = [table for table in parameters.values() if isinstance(table, Mapping)]
    # For "proportional" the factor is the fraction of pairs that turn; all elements are paired.
    tables = [
        table
        for table in (fields.raw, parameters, *of_types)
        if table.get("rope_type") != "proportional"
    ]
    said = [table[key] for table in tables if table.get(key) is not None]
    value = said[-1] if said else None
    share = Fields({key: value}, fields.origin).number(key, float, default=default)
    rotated = int(head_dim * share)
    if rotated % 2 or (head_dim - rotated) % 2 or rotated > head_dim:
        raise CheckpointError(f"{fields.origin}: {key} {share} of {head_dim} is not supported")
    return rotated


def yarn_scale(fields: Fields) -> float:
    """Returns yarn's factor of DeepSeek's attention scores; 1 without `mscale_all_dim`.

    Raises:
        CheckpointError: a value is not a number.
    """
    table = rope_parameters(fields)
    if table.get("rope_type", table.get("type", "default")) == "default":
        return 1.0
    scaling = Fields(table, fields.origin)
    return _yarn_mscale(scaling.number("factor", float), scaling.real("mscale_all_dim", 0.0))


def rope_parameters(fields: Fields) -> Mapping[str, Any]:
    """Returns `rope_parameters`, or `rope_scaling` of older files (beside `rope_theta`).

    Raises:
        CheckpointError: it is not an object.
    """
    return fields.table("rope_parameters") or fields.table("rope_scaling")


def refuse_wrong_factors(config: ModelConfig, origin: str) -> None:
    """Checks that "longrope" has one factor per rotated pair.

    Raises:
        CheckpointError: there are more or fewer.
    """
    pairs = (config.rotary_dim or config.head_dim) // 2
    ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None]
    for rope in ropes:
        counts = {len(rope.pair_factors), len(rope.long_factors)}
        if rope.kind == "longrope" and counts != {pairs}:
            raise CheckpointError(
                f"{origin}: rope_parameters must have {pairs} numbers in short_factor and "
                f"long_factor for head_dim {config.head_dim}, got {len(rope.pair_factors)} and "
                f"{len(rope.long_factors)}"
            )


def _rope_of_kind(table: Fields, default_theta: float, max_positions: int) -> RopeConfig:
    kind = table.raw.get("rope_type", table.raw.get("type", "default"))
    if kind not in _KINDS:
        raise CheckpointError(
            f"{table.origin}: rope_type {kind!r} is not supported; supported are default, "
            "dynamic, linear, llama3, longrope, yarn and in some families proportional"
        )
    theta = table.number("rope_theta", float, default=default_theta)
    if kind in ("default", "dynamic", "mrope"):
        # The three axes of "mrope" are equal for text.
        return RopeConfig(theta, "default" if kind == "mrope" else kind)
    original = table.number(_ORIGINAL, int, default=max_positions)
    if kind in ("longrope", "su"):
        return _long_rope(table, theta, original, max_positions)
    if kind == "proportional":
        share = table.number("partial_rotary_factor", float, default=1.0)
        return RopeConfig(theta, kind, table.number("factor", float, default=1.0), share=share)
    factor = table.number("factor", float)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor,
            table.number("low_freq_factor", float),
            table.number("high_freq_factor", float),
            original,
        )
    mscale, mscale_all = table.real("mscale", 0.0), table.real("mscale_all_dim", 0.0)
    usual = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all:
        usual = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return RopeConfig(
        theta,
        kind,
        factor,
        original_max_positions=original,
        beta_fast=table.number("beta_fast", float, default=32.0),
        beta_slow=table.number("beta_slow", float, default=1.0),
        truncate=table.flag("truncate", default=True),
        scale=table.number("attention_factor", float, default=usual),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _long_rope(table: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    if original < 2:
        raise CheckpointError(f"{table.origin}: {_ORIGINAL} must be above 1, got {original}")
    stretch = table.number("factor", float, default=max_positions / original)
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        original_max_positions=original,
        scale=table.number("attention_factor", float, default=usual),
        pair_factors=table.reals("short_factor"),
        long_factors=table.reals("long_factor"),
    )
