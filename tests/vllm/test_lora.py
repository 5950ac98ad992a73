"""LoRA adapters below our scheduler: vLLM's own tokens, side by side, and no hit across them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from kvmesh.cli.__main__ import main
from kvmesh.core.adapters import adapter_name
from kvmesh.core.types import SamplingParams
from kvmesh.engine.adapters import read_adapter
from kvmesh.engine.protocol import ModelRunner
from tests.engine_alone import generated
from tests.mesh_processes import MODEL_FOLDER, running_mesh
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm_engine import BLOCK_SIZE, load_vllm, write_adapter
from tests.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, seed, hidden=256, queries=256, values=128, layers=6)
        for seed, name in enumerate(NAMES[1:])
    }


def named(adapters: dict[str, Path]) -> str:
    return ",".join(f"{name}={folder}" for name, folder in adapters.items())


@pytest.fixture(scope="module")
def alone(adapters: dict[str, Path]) -> VllmAlone:
    """Before the runner, which changes what vLLM thinks of its backend."""
    return VllmAlone(MODEL_FOLDER, "float32", enable_lora=True, max_loras=2, max_lora_rank=8)


@pytest.fixture(scope="module")
def runner(alone: VllmAlone, adapters: dict[str, Path]) -> Iterator[ModelRunner]:
    made = load_vllm(MODEL_FOLDER, num_blocks=400, dtype="float32", lora=named(adapters))
    yield made
    made.close()


def test_sequences_of_all_adapters_share_steps_and_are_continued_as_by_vllm(
    alone: VllmAlone, runner: ModelRunner, adapters: dict[str, Path]
) -> None:
    prompts = some_prompts(6, 300, seed=7)
    expected = {name: alone.greedy(prompts, 12, adapters.get(name)) for name in NAMES}
    assert len({str(each) for each in expected.values()}) == len(NAMES)
    mixed = [(prompt, name) for prompt in prompts for name in NAMES]
    ids = {adapter_name(each): each for each in ("", *runner.spec.adapters)}
    found = generated(
        runner, [each for each, _ in mixed], GREEDY, adapters=[ids[name] for _, name in mixed]
    )
    wanted = [expected[name][index] for index in range(len(prompts)) for name in NAMES]
    assert found == wanted


def test_a_worker_tells_its_adapters_by_their_content(
    runner: ModelRunner, adapters: dict[str, Path]
) -> None:
    expected = tuple(read_adapter(name, folder).id for name, folder in adapters.items())
    assert runner.spec.adapters == expected


async def test_a_mesh_lists_adapters_as_models_and_no_prefix_is_shared(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    """One adapter is there from the start, and one is loaded while the mesh serves."""
    flags = {
        "engine.block-size": BLOCK_SIZE,
        "engine.num-blocks": 200,
        "engine.lora": f"one={adapters['one']}",
        "engine.max-loras": 2,
        "engine.dtype": "float32",
    }
    (prompt,) = some_prompts(3, 200, seed=8)[1:2]
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    more = {"return_token_ids": True}
    workers = {"prefill": flags, "decode": flags}
    async with running_mesh(tmp_path, 1, 1, engine="vllm", flags=workers) as mesh:
        async with aiohttp.ClientSession(mesh.url, raise_for_status=True) as session:
            scheduler = ("--scheduler", mesh["scheduler"].address)
            secret = ("--secret-file", str(mesh.secret_file))
            load = ["adapter", "load", f"two={adapters['two']}", *scheduler, *secret]
            assert await asyncio.to_thread(main, load) == 0
            listed: list[dict[str, str]] = []

            async def are_listed() -> bool:
                async with session.get("/v1/models") as response:
                    listed[:] = (await response.json())["data"]
                return [each["id"] for each in listed][1:] == ["one", "two"]

            await until(are_listed, "both are listed")
            model = listed[0]["id"]
            assert [each["parent"] for each in listed] == [None, model, model]
            seen = []
            for name in (model, "one", "two", "one"):
                asked = {**body, **more, "model": name}
                async with session.post("/v1/completions", json=asked) as response:
                    answer = await response.json()
                assert answer["model"] == name
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                seen.append((answer["choices"][0]["token_ids"], cached))
        await mesh.idle()
    assert [cached > 0 for _, cached in seen] == [False, False, False, True]
    assert seen[1][0] == seen[3][0]
    assert len({str(ids) for ids, _ in seen}) == 3
