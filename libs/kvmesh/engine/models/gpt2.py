"""GPT-2: norms that take the mean out, learned positions instead of rotation, an MLP without a
gate, biases everywhere; the files hold matrices the other way round.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.nn import functional

from kvmesh.engine.attention import SelfAttention
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.json_fields import Fields
from kvmesh.engine.layer_norms import SerialLayer, load_serial_layer
from kvmesh.engine.models.family import Family
from kvmesh.engine.plain_mlp import PlainMlp
from kvmesh.engine.weights import LayerWeights
from kvmesh.kernels.heads import HeadSpec
from kvmesh.kernels.linear import Linear, make_linear


def _configure(fields: Fields, config: ModelConfig) -> ModelConfig:
    fields.only("add_cross_attention", False)
    fields.only("head_dim", config.hidden_size // config.num_heads)
    fields.only("num_key_value_heads", config.num_heads)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    is_scaled = fields.flag("scale_attn_weights", default=True)
    return replace(
        config,
        intermediate_size=fields.number("n_inner", int, default=4 * config.hidden_size),
        attention_scale=config.attention_scale if is_scaled else 1.0,
        layer_norm=True,
        gated_mlp=False,
        positions_before=0,
        unrotated=frozenset(range(config.num_layers)),
    )


def _transposed(weights: LayerWeights, name: str, rows: int, columns: int) -> Linear:
    weight = weights.tensor(f"{name}.weight", (columns, rows)).T.contiguous()
    return make_linear(weight, weights.vector(f"{name}.bias", rows))


def _load_layer(weights: LayerWeights, config: ModelConfig) -> SerialLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = SelfAttention(
        qkv=_transposed(weights, "attn.c_attn", 3 * hidden, hidden),
        output=_transposed(weights, "attn.c_proj", hidden, hidden),
        spec=HeadSpec(scale=config.attention_scale),
        place=weights.place,
        head_dim=config.head_dim,
        rotation=config.rotation(weights.layer),
    )
    mlp = PlainMlp(
        _transposed(weights, "mlp.c_fc", inner, hidden),
        _transposed(weights, "mlp.c_proj", hidden, inner),
        partial(functional.gelu, approximate="tanh"),
    )
    return load_serial_layer(weights, config, attention, mlp)


FIELD_NAMES = (
    ("layer_norm_epsilon", "rms_norm_eps"),
    ("n_embd", "hidden_size"),
    ("n_head", "num_attention_heads"),
    ("n_layer", "num_hidden_layers"),
    ("n_positions", "max_position_embeddings"),
)
"""Of fields in config.json, GPT-J's too, and what they are called elsewhere."""

FAMILY = Family(
    _configure,
    _load_layer,
    {"max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    activations=("gelu_new", "gelu_pytorch_tanh"),
    aliases=FIELD_NAMES,
    weight_prefix="transformer",
    tensor_names=(
        (".layers.", ".h."),
        ("transformer.embed_tokens.", "transformer.wte."),
        ("transformer.embed_positions.", "transformer.wpe."),
        ("transformer.norm.", "transformer.ln_f."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
    ),
)
