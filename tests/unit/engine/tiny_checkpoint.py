"""A small random checkpoint in the Hugging Face layout, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def tensors(seed: int = 0, head_dim: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, query_rows, kv_rows, intermediate = 32, 4 * head_dim, 2 * head_dim, 48

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    out = {"model.embed_tokens.weight": random(64, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        out |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": random(query_rows, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(kv_rows, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv_rows, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, query_rows),
            f"{prefix}.mlp.gate_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": random(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, intermediate),
        }
    return out


def write_checkpoint(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors(seed), folder / "model.safetensors")
    return folder
