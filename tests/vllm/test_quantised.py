"""A checkpoint with weights of 8 bits (compressed-tensors): its tokens are vLLM's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.core.types import SamplingParams
from tests.e2e.api_client import ApiClient, placed
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER, running_mesh
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DTYPE = "bfloat16"
WEIGHTS = "model.safetensors"
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}


def write_quantised(folder: Path) -> Path:
    """The embedded model with one scale for each row of each projection, as llm-compressor does."""
    shutil.copytree(MODEL_FOLDER, folder)
    weights = {}
    for name, values in load_file(MODEL_FOLDER / WEIGHTS).items():
        if name.endswith("_proj.weight"):
            scales = values.float().abs().amax(dim=1, keepdim=True) / 127
            weights[name] = (values.float() / scales).round().to(torch.int8)
            weights[f"{name}_scale"] = scales.to(values.dtype)
        else:
            weights[name] = values
    assert any(each.dtype is torch.int8 for each in weights.values())
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("quantised") / "model")


async def test_tokens_are_those_of_vllm_alone_and_of_both_placements(
    quantised: Path, tmp_path: Path
) -> None:
    prompts = some_prompts(12, 300, seed=6)
    alone = VllmAlone(quantised, DTYPE)
    expected = [alone.greedy([prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    runner = load_vllm(quantised, num_blocks=200, dtype=DTYPE)
    assert [generated(runner, [prompt], GREEDY)[0] for prompt in prompts] == expected
    runner.close()
    whole = load_vllm(MODEL_FOLDER, num_blocks=200, dtype=DTYPE)
    assert whole.spec.layout.model_fingerprint != runner.spec.layout.model_fingerprint
    assert [generated(whole, [prompt], GREEDY)[0] for prompt in prompts] != expected
    whole.close()
    engine = {
        "engine.model": quantised,
        "engine.dtype": DTYPE,
        "engine.block-size": BLOCK_SIZE,
        "engine.num-blocks": 200,
    }
    flags = {"prefill": engine, "decode": engine}
    async with running_mesh(tmp_path, 1, 1, engine="vllm", flags=flags) as mesh:
        async with ApiClient(mesh.url) as client:
            for placement in ("disaggregated", "aggregated"):
                for prompt, tokens in zip(prompts, expected, strict=True):
                    answer = await client.complete(
                        prompt, headers=placed(placement), max_tokens=16, ignore_eos=True
                    )
                    assert answer.token_ids == tokens, placement
        await mesh.idle()
