"""Phi-3 and Phi-4: Llama with queries, keys and values in one tensor, and gates and ups in one."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.families.family import Family, uniform_window
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rope_of, rope_parameters, rotary_dim

_ORIGINAL = "original_max_position_embeddings"


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    # transformers reads "yarn" as this family's own kind, whose older name is "su".
    if config.rope.kind not in ("default", "longrope"):
        raise CheckpointError(
            f"{fields.origin}: rope_type {config.rope.kind!r} is not supported in phi3; supported "
            "are default and longrope"
        )
    rotated = rotary_dim(fields, config.head_dim)
    return replace(
        config,
        rope=_rope(fields, config.rope),
        rotary_dim=0 if rotated == config.head_dim else rotated,
        windows=uniform_window(fields, config),
        qkv_bias=False,
        output_bias=False,
    )


def _rope(fields: Fields, usual: RopeConfig) -> RopeConfig:
    """Reads the rotary embedding; the original length beside its parameters takes precedence."""
    if usual.kind == "default":
        return usual
    original = fields.number(_ORIGINAL, int, default=4096)
    table = {**rope_parameters(fields), _ORIGINAL: original}
    return rope_of(Fields({**fields.raw, "rope_parameters": table}, fields.origin))


FAMILY = Family(_configure, {"rms_norm_eps": 1e-5})
