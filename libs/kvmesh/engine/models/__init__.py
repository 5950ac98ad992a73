"""The model families, by the `model_type` of their config.json. docs/adding-a-model.md."""

from __future__ import annotations

from kvmesh.engine.models import (
    bailing_hybrid,
    deepseek,
    gemma3,
    gpt_oss,
    kimi_linear,
    llama,
    minimax,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
)
from kvmesh.engine.models.family import Family

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "phi3": phi3.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen3_5_text": qwen3_5.DENSE,
    "qwen3_5_moe_text": qwen3_5.SPARSE,
    "qwen3_5": qwen3_5.SEEING_DENSE,
    "qwen3_5_moe": qwen3_5.SEEING_SPARSE,
    "gemma3_text": gemma3.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "bailing_hybrid": bailing_hybrid.FAMILY,
    "kimi_linear": kimi_linear.FAMILY,
    "minimax": minimax.FAMILY,
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
}
