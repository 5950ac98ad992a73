"""Embeddings are those of `vllm.LLM`, which loads a model for pooling alone."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

from tests.e2e.api_client import ApiClient, placed
from tests.engine_alone import embedded
from tests.mesh_processes import MODEL_FOLDER, running_mesh
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm

WIDTH, PROJECTED = 256, 96
MODULES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
    "2_Dense": "sentence_transformers.models.Dense",
    "3_Normalize": "sentence_transformers.models.Normalize",
}
ALONE: dict[str, Any] = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
PROMPTS = some_prompts(12, 900, seed=13)


def write_embedding_model(folder: Path, mode: str, **config: Any) -> Path:
    """The embedded model as Sentence Transformers keeps one: with pooling and a projection."""
    shutil.copytree(MODEL_FOLDER, folder)
    changed = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(changed))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(MODULES.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in MODULES:
        (folder / path).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": WIDTH, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = {
        "in_features": WIDTH,
        "out_features": PROJECTED,
        "bias": False,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight = torch.randn(PROJECTED, WIDTH, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    return folder


def numbers(embedding: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))


def close_to(expected: list[float]) -> Any:
    return pytest.approx(expected, abs=1e-5)


@dataclass(frozen=True)
class Said:
    """What vLLM alone says: of the embedded model, and of one with a projection, by dimensions."""

    plain: list[list[float]]
    projected: dict[int, list[list[float]]]
    folder: Path


@pytest.fixture(scope="module", autouse=True)
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Before any runner, which changes what vLLM thinks of its backend."""
    folder = tmp_path_factory.mktemp("projected") / "model"
    write_embedding_model(folder, "lasttoken", matryoshka_dimensions=[32, PROJECTED])
    plain = VllmAlone(MODEL_FOLDER, "float32", **ALONE).embeddings(PROMPTS)
    alone = VllmAlone(folder, "float32", **ALONE)
    return Said(
        plain, {count: alone.embeddings(PROMPTS, count or None) for count in (0, 32)}, folder
    )


def test_a_projected_model_gives_shorter_vectors_where_it_was_trained_for_them(
    said: Said,
) -> None:
    assert [len(vectors[0]) for vectors in said.projected.values()] == [PROJECTED, 32]
    runner = load_vllm(said.folder, num_blocks=400, dtype="float32")
    spec = runner.spec.embedding
    assert spec is not None
    assert (spec.size, spec.shorter) == (PROJECTED, (32,))
    for count, vectors in said.projected.items():
        found = embedded(runner, PROMPTS, count)
        assert [numbers(each) for each in found] == [close_to(each) for each in vectors]
    runner.close()


def test_a_model_that_takes_the_mean_has_none(tmp_path: Path) -> None:
    runner = load_vllm(
        write_embedding_model(tmp_path / "model", "mean_tokens"), num_blocks=40, dtype="float32"
    )
    assert runner.spec.embedding is None
    runner.close()


async def test_vectors_are_those_of_vllm_alone_and_of_both_placements(
    said: Said, tmp_path: Path
) -> None:
    prompts, expected = PROMPTS, said.plain
    assert len(expected[0]) == WIDTH
    runner = load_vllm(MODEL_FOLDER, num_blocks=400, dtype="float32")
    for max_tokens in (512, 96):
        found = embedded(runner, prompts, max_tokens=max_tokens)
        assert [numbers(each) for each in found] == [close_to(each) for each in expected]
    runner.close()
    engine = {"engine.block-size": BLOCK_SIZE, "engine.num-blocks": 200}
    flags = {"prefill": engine, "decode": engine}
    async with running_mesh(tmp_path, 1, 1, engine="vllm", flags=flags) as mesh:
        async with ApiClient(mesh.url) as client, aiohttp.ClientSession(mesh.url) as session:
            first = await client.complete(prompts[1], max_tokens=4, ignore_eos=True)
            for placement in ("disaggregated", "aggregated"):
                # Prompts of one call wait for each other, on a busy machine for long.
                patient = placed(placement) | {"x-slo-ttft-ms": "60000"}
                asked = session.post("/v1/embeddings", json={"input": prompts}, headers=patient)
                async with asked as response:
                    body = await response.json()
                assert response.status == 200, body
                found_here = [each["embedding"] for each in body["data"]]
                assert found_here == [close_to(each) for each in expected]
            again = await client.complete(prompts[1], max_tokens=4, ignore_eos=True)
            assert again.token_ids == first.token_ids
            async with session.post(
                "/v1/embeddings", json={"input": prompts[0], "dimensions": 32}
            ) as response:
                body = await response.json()
            assert (response.status, body["error"]["code"]) == (400, "invalid_value")
            assert "this model allows 256" in body["error"]["message"]
        await mesh.idle()
