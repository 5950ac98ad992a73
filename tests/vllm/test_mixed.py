"""A group with vLLM and a group with our engine serve one model side by side."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.api_client import ApiClient
from tests.mesh_processes import running_mesh
from tests.vllm.oracle import some_prompts
from tests.vllm_engine import BLOCK_SIZE

NUM_TOKENS = 12


async def test_both_serve_and_neither_takes_the_other_s_kv(tmp_path: Path) -> None:
    vllm = {
        "engine.kind": "vllm",
        "engine.block-size": BLOCK_SIZE,
        "engine.num-blocks": 200,
    }
    flags = {"prefill-1": vllm, "decode-1": vllm}
    groups = [{"prefill-0", "decode-0"}, {"prefill-1", "decode-1"}]
    prompts = some_prompts(6, 200, seed=7)
    answers: list[set[int]] = [set(), set()]
    async with (
        running_mesh(tmp_path, 2, 2, engine="kvmesh", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        seen: dict[int, list[int]] = {}
        for _ in range(6):
            for index, prompt in enumerate(prompts):
                answer = await client.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
                assert answer.ok, answer.error
                workers = {answer.prefill_worker, answer.decode_worker}
                (number,) = [each for each, group in enumerate(groups) if workers <= group]
                answers[number].add(index)
                # In float32 both engines are exact enough to say the same.
                assert seen.setdefault(index, answer.token_ids) == answer.token_ids
        assert all(answers), "both groups have served"
        await mesh.idle()
