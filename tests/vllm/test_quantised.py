"""Checkpoints with weights of 8 and of 4 bits: their tokens are vLLM's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvmesh.core.native_libraries import cpu_flags
from kvmesh.core.types import SamplingParams
from tests.e2e.api_client import ApiClient, placed
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER, running_mesh
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DTYPE = "bfloat16"
WEIGHTS = "model.safetensors"
GROUP = 32
"""Inputs that share a scale, where weights have 4 bits."""
INT8: dict[str, Any] = {
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
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
}


def int8(weight: Tensor) -> dict[str, Tensor]:
    """One scale for each row, as llm-compressor writes it."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    whole = (weight.float() / scales).round().to(torch.int8)
    return {"weight": whole, "weight_scale": scales.to(weight.dtype)}


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """4 bits around 8, packed along the inputs."""
    inputs = weight.shape[1]
    whole, scales = four_bits(weight)
    zeros = torch.full_like(scales, 7, dtype=torch.int32)  # one less than it is, in this format
    return {
        "qweight": packed(whole.T).T.contiguous(),
        "qzeros": packed(zeros),
        "scales": scales.half(),
        "g_idx": (torch.arange(inputs) // GROUP).to(torch.int32),
    }


def awq(weight: Tensor) -> dict[str, Tensor]:
    """4 bits above a zero, packed along the outputs in AWQ's order."""
    whole, scales = four_bits(weight)
    zeros = torch.full_like(scales, 8, dtype=torch.int32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(whole, order),
        "qzeros": packed(zeros, order),
        "scales": scales.half(),
    }


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values 0 to 15 as [inputs, outputs], and scales as [groups, outputs]."""
    columns = weight.float().T
    groups = columns.reshape(-1, GROUP, columns.shape[1])
    scales = groups.abs().amax(dim=1) / 7
    whole = (groups / scales[:, None]).round().clamp(-8, 7) + 8
    return whole.reshape(columns.shape).to(torch.int32), scales


def packed(values: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Eight values of a row in one number, the first of `order` in its lowest bits."""
    parts = values.reshape(values.shape[0], -1, 8)
    made = torch.zeros(parts.shape[:2], dtype=torch.int64)
    for place, index in enumerate(order):
        made |= parts[:, :, index].to(torch.int64) << (4 * place)
    return made.to(torch.int32)


def write_quantised(
    folder: Path, config: dict[str, Any], quantise: Callable[[Tensor], dict[str, Tensor]]
) -> Path:
    """The embedded model with all of its projections quantised."""
    shutil.copytree(MODEL_FOLDER, folder)
    weights: dict[str, Tensor] = {}
    for name, values in load_file(MODEL_FOLDER / WEIGHTS).items():
        if name.endswith("_proj.weight"):
            parts = quantise(values)
            weights |= {
                f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()
            }
        else:
            weights[name] = values
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("quantised") / "model", INT8, int8)


@pytest.mark.skipif(
    "avx2" in cpu_flags() and "avx512f" not in cpu_flags(),
    reason="vLLM's build has products of 4-bit weights for x86 CPUs with AVX-512 alone",
)
@pytest.mark.parametrize(("config", "quantise"), [(GPTQ, gptq), (AWQ, awq)], ids=["gptq", "awq"])
def test_other_methods_are_read_and_said_as_by_vllm_alone(
    config: dict[str, Any], quantise: Callable[[Tensor], dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = write_quantised(tmp_path / "model", config, quantise)
    prompts = some_prompts(6, 300, seed=6)
    alone = VllmAlone(folder, DTYPE)
    expected = [alone.greedy([prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    runner = load_vllm(folder, num_blocks=200, dtype=DTYPE)
    assert [generated(runner, [prompt], GREEDY)[0] for prompt in prompts] == expected
    runner.close()


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
    await mesh_says(tmp_path, quantised, prompts, expected)


async def test_tokens_of_two_ranks_are_those_of_two_ranks_of_vllm_alone(
    quantised: Path, tmp_path: Path
) -> None:
    """Each rank scales its part of the activations, so one rank may say something else."""
    prompts = some_prompts(6, 300, seed=6)
    alone = VllmAlone(quantised, DTYPE, tensor_parallel_size=2)
    expected = [alone.greedy([prompt], GREEDY.max_tokens)[0] for prompt in prompts]
    await mesh_says(tmp_path, quantised, prompts, expected, ranks=2)


async def mesh_says(
    tmp_path: Path,
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    *,
    ranks: int = 1,
) -> None:
    """Checks the tokens of one worker and of two."""
    engine = {
        "engine.model": folder,
        "engine.dtype": DTYPE,
        "engine.block-size": BLOCK_SIZE,
        "engine.num-blocks": 200,
        "engine.tensor-parallel": ranks,
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
