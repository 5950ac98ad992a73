"""Granite 3: Llama with factors of embeddings, attention scores, residual parts and logits.

The residual stream is kept divided by the residual factor. Norms do not depend on that, except for
their epsilon, and nothing needs to be multiplied by the factor.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def scaled(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Returns a config with the four factors.

    Raises:
        CheckpointError: one of them is not positive.
    """

    def factor(name: str) -> float:
        return fields.number(name, float, default=1.0)

    residual = factor("residual_multiplier")
    return replace(
        config,
        attention_scale=factor("attention_multiplier"),
        embedding_scale=factor("embedding_multiplier") / residual,
        rms_norm_eps=config.rms_norm_eps / residual**2,
        logit_scale=1 / factor("logits_scaling"),
    )


FAMILY = Family(scaled)
