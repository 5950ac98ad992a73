"""Random Llama checkpoints of two sizes, in the Hugging Face layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama with heads of 64 and tied embeddings."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocab: int = 32000

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the head."""
        return self.vocab * self.hidden

    @property
    def kv_values(self) -> int:
        """Values that one position has in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("110M", 768, 12, 12, 4, 2304),
        Shape("0.5B", 1024, 24, 16, 4, 5120),
    )
}

SERVED_SHAPE = replace(SHAPES["110M"], vocab=4096)
"""A shape for the embedded model's tokenizer: tokens beyond its vocabulary have no text, so a
client's stream would not show them."""


def config_of(shape: Shape) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def write_checkpoint(shape: Shape, folder: Path, seed: int) -> Path:
    """Writes config and bf16 weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2))
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": random(shape.vocab, shape.hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ones.clone()
        for name, rows, columns in (
            ("self_attn.q_proj", q_rows, shape.hidden),
            ("self_attn.k_proj", kv_rows, shape.hidden),
            ("self_attn.v_proj", kv_rows, shape.hidden),
            ("self_attn.o_proj", shape.hidden, q_rows),
            ("mlp.gate_proj", shape.intermediate, shape.hidden),
            ("mlp.up_proj", shape.intermediate, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.intermediate),
        ):
            tensors[f"{prefix}.{name}.weight"] = random(rows, columns)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
