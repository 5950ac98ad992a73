"""GPT-J: LayerNorms, attention and an MLP without a gate in parallel after one norm, rotation of a
part of each head in neighbouring pairs, biases of the MLP and of logits.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import CheckpointError
from kvmesh.engine.config import ModelConfig, RopeConfig
from kvmesh.engine.families.family import Family
from kvmesh.engine.families.gpt2 import FIELD_NAMES
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("head_dim", config.hidden_size // config.num_heads)
    fields.only("num_key_value_heads", config.num_heads)
    if config.rope != RopeConfig(10000.0):
        raise CheckpointError(f"{fields.origin}: rope_parameters are not supported in gptj")
    rotated = fields.number("rotary_dim", int)
    if rotated % 2 or rotated > config.head_dim:
        raise CheckpointError(
            f"{fields.origin}: rotary_dim {rotated} of {config.head_dim} is not supported"
        )
    return replace(
        config,
        intermediate_size=fields.number("n_inner", int, default=4 * config.hidden_size),
        layer_norm=True,
        parallel=True,
        gated_mlp=False,
        mlp_bias=True,
        head_bias=True,
        interleaved=True,
        rotary_dim=rotated,
    )


FAMILY = Family(
    _configure,
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rotary_dim": 64},
    activations=("gelu_new", "gelu_pytorch_tanh"),
    aliases=FIELD_NAMES,
    weight_prefix="transformer",
    tensor_names=(
        (".layers.", ".h."),
        ("transformer.embed_tokens.", "transformer.wte."),
        ("transformer.norm.", "transformer.ln_f."),
        (".input_layernorm.", ".ln_1."),
        (".self_attn.o_proj.", ".attn.out_proj."),
        (".self_attn.", ".attn."),
        (".mlp.up_proj.", ".mlp.fc_in."),
        (".mlp.down_proj.", ".mlp.fc_out."),
    ),
)
