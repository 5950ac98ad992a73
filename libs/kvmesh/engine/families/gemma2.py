"""Gemma 2: Gemma 3 without norms of queries and keys, with soft-capping of scores and logits."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family, types_or_each_nth, windows_of_types
from kvmesh.engine.families.gemma3 import NORM_OFFSET
from kvmesh.engine.json_fields import Fields

_ATTENTION_CAP, _LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    def cap(key: str) -> float:
        return 0.0 if fields.raw.get(key) is None else fields.number(key, float)

    types = types_or_each_nth(fields, config.num_layers, 2)
    scalar = fields.number("query_pre_attn_scalar", float, default=256.0)
    return replace(
        config,
        windows=windows_of_types(fields, types),
        attention_scale=scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
        attention_cap=cap(_ATTENTION_CAP),
        logit_cap=cap(_LOGIT_CAP),
    )


FAMILY = Family(
    _configure,
    {
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        _ATTENTION_CAP: 50.0,
        _LOGIT_CAP: 30.0,
    },
    activations=("gelu_pytorch_tanh",),
    computed_keys=frozenset({_ATTENTION_CAP, _LOGIT_CAP}),
    rounds_embedding_scale=True,
    norm_offset=NORM_OFFSET,
)
