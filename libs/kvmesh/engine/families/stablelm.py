"""StableLM: LayerNorms, rotation of a quarter of each head; attention and MLP are in parallel if
the file says so. The 12B model, with norms of queries and keys, is not supported.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("head_dim", config.hidden_size // config.num_heads)
    fields.only("qk_layernorm", False)
    return replace(
        config,
        layer_norm=True,
        parallel=fields.flag("use_parallel_residual"),
        qkv_bias=fields.flag("use_qkv_bias"),
        output_bias=False,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.25),
    )


FAMILY = Family(
    _configure,
    {"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    computed_keys=frozenset({"use_qkv_bias"}),
    aliases=(("layer_norm_eps", "rms_norm_eps"),),
)
