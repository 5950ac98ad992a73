"""Falcon 7B, 40B, 180B and Falcon 2: LayerNorms, attention and an MLP without a gate in parallel
after one shared norm or one norm each; queries, keys and values are one tensor in the files. Models
with ALiBi (Falcon-RW) are not supported.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("activation", "gelu")
    fields.only("alibi", False)
    fields.only("head_dim", config.hidden_size // config.num_heads)
    bias, is_newer = fields.flag("bias"), fields.flag("new_decoder_architecture")
    if is_newer:
        fields.only("parallel_attn", True)
    fields.only("num_ln_in_parallel_attn", *((1, 2) if is_newer else (1,)))
    norms = fields.number("num_ln_in_parallel_attn", int, default=2 if is_newer else 1)
    return replace(
        config,
        intermediate_size=fields.number("ffn_hidden_size", int, default=4 * config.hidden_size),
        num_kv_heads=_kv_heads(fields, config, is_newer=is_newer),
        layer_norm=True,
        parallel=fields.flag("parallel_attn", default=True),
        norm_each=norms == 2,
        gated_mlp=False,
        mlp_bias=bias,
        qkv_bias=bias,
        output_bias=bias,
    )


def _kv_heads(fields: Fields, config: ModelConfig, *, is_newer: bool) -> int:
    heads = config.num_heads
    if not is_newer and fields.flag("multi_query", default=True):
        return 1
    kv_heads = fields.number("num_kv_heads", int, default=heads)
    if heads % kv_heads or (not is_newer and kv_heads != heads):
        raise CheckpointError(f"{fields.origin}: num_kv_heads {kv_heads} of {heads} heads")
    return kv_heads


FAMILY = Family(
    _configure,
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    aliases=(("layer_norm_epsilon", "rms_norm_eps"), ("n_embed", "hidden_size")),
    weight_prefix="transformer",
    tensor_names=(
        (".layers.", ".h."),
        ("transformer.embed_tokens.", "transformer.word_embeddings."),
        ("transformer.norm.", "transformer.ln_f."),
        (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
        (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
    ),
)
