"""HyperCLOVA X: Granite with norms before and after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.granite import scaled
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    usual = {"attention_multiplier": config.attention_scale}
    given = {key: value for key, value in fields.raw.items() if value is not None}
    known = Fields({**usual, **given}, fields.origin)
    # Granite divides logits by this factor, this family multiplies them.
    configured = replace(
        scaled(known, config), logit_scale=fields.number("logits_scaling", float, default=1.0)
    )
    if not fields.flag("use_post_norm", default=True):
        return configured
    # Each part ends with a norm, whose weight takes the factor; the stream is not divided.
    factor = fields.number("residual_multiplier", float, default=1.0)
    return replace(
        configured,
        rms_norm_eps=config.rms_norm_eps,
        embedding_scale=configured.embedding_scale * factor,
        residual_factors=((1.0, factor),) * 3,
    )


FAMILY = Family(_configure)
