"""Checkpoints that also see pictures are served as the decoder that is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from kvmesh.engine.runner import TorchRunner
from tests.integration.families import BLOCK_SIZE, NEW_TOKENS
from tests.integration.family_configs import CONFIGS
from tests.integration.test_transformers_equality import Homes, Stream, run

SIGHT: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 60,
    "num_position_embeddings": 16,
}
OTHER_SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


# Windows in the upper layers; sections of the rope are shares of a head's pairs.
QWEN2_DECODER: dict[str, Any] = {
    "hidden_size": 96,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
    "layer_types": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [2, 3, 3],
    },
}
QWEN3_MOE_DECODER = ("qwen3-moe-one-dense-layer", {"model_type": "qwen3_vl_moe_text"})
DEEP_SIGHT = SIGHT | {"deepstack_visual_indexes": [0]}


class Case(NamedTuple):
    """How a seeing model is made.

    Attributes:
        decoder: label of a decoder's config, and what is changed in it.
        whole: more of the whole model's config.
    """

    config_class: Any
    model_class: Any
    decoder: tuple[str, dict[str, Any]]
    whole: dict[str, Any]


CASES = {
    "qwen3.5": Case(
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        ("qwen3.5", {}),
        {"vision_config": SIGHT, "tie_word_embeddings": True},
    ),
    "qwen3.5-moe": Case(
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        ("qwen3.5-moe", {}),
        {"vision_config": SIGHT, "tie_word_embeddings": False},
    ),
    "qwen3-vl": Case(
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        ("qwen3-untied", {"model_type": "qwen3_vl_text"}),
        {"vision_config": DEEP_SIGHT, "tie_word_embeddings": False},
    ),
    "qwen3-vl-moe": Case(
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        QWEN3_MOE_DECODER,
        {"vision_config": DEEP_SIGHT, "tie_word_embeddings": False},
    ),
    "qwen3-vl-moe-published": Case(
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        QWEN3_MOE_DECODER,
        {"vision_config": DEEP_SIGHT, "tie_word_embeddings": False},
    ),
    "qwen2.5-vl": Case(
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        ("qwen2-tied", QWEN2_DECODER | {"model_type": "qwen2_5_vl_text"}),
        {"vision_config": SIGHT, "tie_word_embeddings": True},
    ),
    "qwen2-vl-published": Case(
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        ("qwen2-tied", QWEN2_DECODER | {"model_type": "qwen2_vl_text"}),
        {"vision_config": SIGHT | {"embed_dim": 16}, "tie_word_embeddings": False},
    ),
    "gemma3": Case(
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        ("gemma3", {}),
        {
            "vision_config": OTHER_SIGHT | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": Case(
        Gemma4Config, Gemma4ForConditionalGeneration, ("gemma4", {}), {"tie_word_embeddings": True}
    ),
    "gemma4-published": Case(
        Gemma4Config, Gemma4ForConditionalGeneration, ("gemma4", {}), {"tie_word_embeddings": True}
    ),
    "mistral3": Case(
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        ("mistral-window", {}),
        {
            "vision_config": OTHER_SIGHT | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": Case(
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        ("ministral3", {}),
        {
            "vision_config": OTHER_SIGHT | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
    ),
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


def transpose_experts(folder: Path) -> None:
    """Stores the products of experts the other way round, as published files have them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file)


def open_the_decoders_keys(folder: Path) -> None:
    """Puts the decoder's keys beside the others, under the names that published files have."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    inner = whole.pop("text_config")
    rope = inner.pop("rope_parameters")
    del inner["layer_types"]
    older = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    path.write_text(json.dumps(inner | whole | older))


def forget_that_the_head_is_its_own(folder: Path) -> None:
    """Leaves out a key as published files do; they have a head, which then counts."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for keys in (whole, whole["text_config"]):
        keys.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(whole))


def say_heads_of_full_attention_by_their_older_keys(folder: Path) -> None:
    """What newer files say of each layer, older ones say once."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    inner = whole["text_config"]
    (said,) = {tuple(each.items()) for each in inner.pop("per_layer_config").values()}
    assert said == (("head_dim", 32),)
    inner |= {"global_head_dim": 32, "num_global_key_value_heads": None}
    path.write_text(json.dumps(whole))


PUBLISHED = {
    "gemma4-published": say_heads_of_full_attention_by_their_older_keys,
    "qwen3.5-moe": stack_experts,
    "mistral3": forget_that_the_head_is_its_own,
    "qwen3-vl-moe-published": transpose_experts,
    "qwen2-vl-published": open_the_decoders_keys,
}
"""What makes files of today look like published ones."""


@pytest.mark.parametrize("name", list(CASES))
def test_the_decoder_of_a_seeing_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    label, changes = case.decoder
    config = case.config_class(text_config=CONFIGS[label].to_dict() | changes, **case.whole)
    model = case.model_class(config).eval()
    model.save_pretrained(tmp_path)
    if name in PUBLISHED:
        PUBLISHED[name](tmp_path)
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
