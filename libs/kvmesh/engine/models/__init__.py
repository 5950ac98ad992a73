"""The model families, by the `model_type` of their config.json. docs/adding-a-model.md."""

from __future__ import annotations

from kvmesh.engine.models import (
    gemma3,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from kvmesh.engine.models.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
}
