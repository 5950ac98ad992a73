"""GPT-NeoX and Pythia: LayerNorms, attention and MLP in parallel after one norm each, rotation of a
quarter of each head. Queries, keys and values of a head are one tensor in the files.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.rope_fields import rotary_dim


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("head_dim", config.hidden_size // config.num_heads)
    fields.only("num_key_value_heads", config.num_heads)
    return replace(
        config,
        layer_norm=True,
        parallel=fields.flag("use_parallel_residual", default=True),
        gated_mlp=False,
        mlp_bias=True,
        rotary_dim=rotary_dim(fields, config.head_dim, default=0.25),
    )


FAMILY = Family(
    _configure,
    {"attention_bias": True, "rms_norm_eps": 1e-5},
    activations=("gelu",),
    aliases=(
        ("layer_norm_eps", "rms_norm_eps"),
        ("rotary_emb_base", "rope_theta"),
        ("rotary_pct", "partial_rotary_factor"),
    ),
    weight_prefix="gpt_neox",
    tensor_names=(
        ("lm_head.", "embed_out."),
        ("gpt_neox.embed_tokens.", "gpt_neox.embed_in."),
        ("gpt_neox.norm.", "gpt_neox.final_layer_norm."),
        (".self_attn.o_proj.", ".attention.dense."),
        (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
        (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
    ),
)
