"""Checkpoints that also see pictures are served as the decoder that is in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from kvmesh.engine.runner import TorchRunner
from tests.integration.families import BLOCK_SIZE, CONFIGS, NEW_TOKENS
from tests.integration.test_transformers_equality import Homes, Stream, run

SIGHT = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 60,
    "num_position_embeddings": 16,
}
CASES: dict[str, tuple[Any, Any]] = {
    "qwen3.5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


def stack_experts(folder: Path) -> None:
    """Rewrites experts one by one as the two stacked tensors that published files have."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for prefix in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):
        parts: dict[str, list[torch.Tensor]] = {}
        for kind in ("gate", "up", "down"):
            names = [f"{prefix}.experts.{expert}.{kind}_proj.weight" for expert in range(6)]
            parts[kind] = [tensors.pop(name) for name in names]
        gate, up, down = (torch.stack(parts[kind]) for kind in ("gate", "up", "down"))
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}.experts.down_proj"] = down
    save_file(tensors, file)


@pytest.mark.parametrize("name", list(CASES))
def test_the_decoder_of_a_seeing_model(name: str, tmp_path: Path) -> None:
    whole, model_class = CASES[name]
    torch.manual_seed(3)
    config = whole(text_config=CONFIGS[name].to_dict(), vision_config=SIGHT)
    config.tie_word_embeddings = name == "qwen3.5"
    model = model_class(config).eval()
    model.save_pretrained(tmp_path)
    if name == "qwen3.5-moe":
        stack_experts(tmp_path)
    prompt = [(7 * position) % 300 for position in range(50)]
    ids = torch.tensor([prompt])
    wanted = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    runner = TorchRunner.load(tmp_path, served_name="tiny", num_blocks=1024, block_size=BLOCK_SIZE)
    stream = Stream(prompt, Homes(runner).home(len(prompt)))
    run(runner, [stream], chunk=20)
    assert stream.tokens == wanted[0].tolist()
