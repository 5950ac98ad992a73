"""StarCoder2: LayerNorms, an MLP without a gate, biases, and a window in all layers if the file has
one.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.families.family import Family, uniform_window
from kvmesh.engine.json_fields import Fields


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    bias = fields.flag("use_bias", default=True)
    return replace(
        config,
        layer_norm=True,
        gated_mlp=False,
        mlp_bias=bias,
        qkv_bias=bias,
        output_bias=bias,
        windows=uniform_window(fields, config),
    )


FAMILY = Family(
    _configure,
    {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    activations=("gelu_pytorch_tanh",),
    computed_keys=frozenset({"use_bias"}),
    aliases=(("norm_epsilon", "rms_norm_eps"),),
    tensor_names=((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj.")),
)
