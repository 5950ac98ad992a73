"""GLM-4 and its second version, GLM-4-0414: half of each head is rotated, in neighbouring pairs.
0414 has norms before and after each part.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    return replace(
        config,
        output_bias=False,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.5),
        interleaved=True,
    )


_DEFAULTS = {"attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-7}

GLM = Family(_configure, _DEFAULTS)

GLM4 = Family(_configure, _DEFAULTS)
