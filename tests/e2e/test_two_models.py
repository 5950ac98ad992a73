"""One mesh with two models in real processes, each with its weights, tokenizer and template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from kvmesh.core.types import SamplingParams
from kvmesh.engine.runner import TorchRunner
from tests.e2e.api_client import ApiClient, placed
from tests.engine_alone import generated
from tests.mesh_processes import BLOCK_SIZE, MODEL, MODEL_FOLDER, Flags, running_mesh
from tests.unit.engine.tiny_checkpoint import CONFIG, write_checkpoint
from tests.unit.gateway.tiny_model import CHAT_TEMPLATE, make_tokenizer

OTHER = "other"
PROMPT = list(range(5, 45))
"""Both know these tokens, so nothing but the model's name says whose they are."""
NUM_TOKENS = 12
HI: list[Any] = [{"role": "user", "content": "hi"}]


def write_other(folder: Path) -> Path:
    """Random weights under a tokenizer and a template that are not pydoc's."""
    write_checkpoint(folder)
    tokenizer = make_tokenizer()
    assert tokenizer.get_vocab_size() > CONFIG["vocab_size"]
    vocabulary = json.loads(tokenizer.to_str())
    model = vocabulary["model"]
    # As many tokens as the weights have rows: bytes, without merges.
    model["vocab"] = {word: row for word, row in model["vocab"].items() if row < 64}
    model["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def alone(folder: Path) -> list[int]:
    runner = TorchRunner.load(
        folder, served_name="m", dtype="float32", num_blocks=64, block_size=BLOCK_SIZE
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (tokens,) = generated(runner, [PROMPT], sampling)
    return tokens


@pytest.mark.slow
async def test_each_request_goes_to_the_workers_of_its_model(tmp_path: Path) -> None:
    other = write_other(tmp_path / "weights")
    expected = {MODEL: alone(MODEL_FOLDER), OTHER: alone(other)}
    theirs = {"engine.model": other, "engine.model-name": OTHER}
    flags: dict[str, Flags] = {
        "prefill-1": theirs,
        "decode-1": theirs,
        "gateway": {"model.others": f"{OTHER}={other},byte={other}"},
    }
    workers = {MODEL: {"prefill-0", "decode-0"}, OTHER: {"prefill-1", "decode-1"}}
    async with (
        running_mesh(tmp_path, engine="kvmesh", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
        AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as official,
    ):
        assert [each.id async for each in official.models.list()] == [MODEL, OTHER, "byte"]
        for placement in ("disaggregated", "aggregated", "disaggregated"):
            for model in (MODEL, OTHER):
                answer = await client.complete(
                    PROMPT,
                    headers=placed(placement),
                    model=model,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                )
                assert answer.token_ids == expected[model], (model, placement)
                assert {answer.prefill_worker, answer.decode_worker} <= workers[model]
        # The last round found its own prefix again, and not the other model's.
        assert answer.cached_tokens == 2 * BLOCK_SIZE
        lengths = {}
        for model in (MODEL, "byte"):
            said = await official.chat.completions.create(model=model, messages=HI, max_tokens=4)
            assert said.usage is not None
            lengths[model] = said.usage.prompt_tokens
        assert lengths[MODEL] != lengths["byte"], "each has its tokenizer and template"
        with pytest.raises(NotFoundError, match=f"served: {MODEL}, {OTHER}, byte"):
            await official.chat.completions.create(model="third", messages=HI)
        await mesh.idle()
    shutil.rmtree(other)
