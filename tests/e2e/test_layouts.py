"""Workers whose KV differs: refused within a group, and side by side as two groups."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.api_client import ApiClient
from tests.mesh_processes import running_mesh

PROMPT = list(range(5, 70))
NUM_TOKENS = 8
ENOUGH = 40
"""Requests of which each group gets some: none for one of two has a chance of 2 to the minus 39."""


async def test_a_worker_that_cannot_exchange_kv_ends_and_says_why(tmp_path: Path) -> None:
    flags = {"decode-1": {"engine.fake-token-bytes": 16}}
    async with running_mesh(tmp_path, 1, 1, flags=flags) as mesh:
        stranger = mesh.add_worker("decode-1")
        assert await stranger.exit_code() == 2
        (said,) = [each["error"] for each in stranger.events() if each["event"] == "cannot_start"]
        assert "the scheduler refuses this worker: decode-1 cannot exchange KV with" in said
        for words in ("fake BL2NHD", "with 1 heads of 1", "with 2 heads of 1"):
            assert words in said
        async with ApiClient(mesh.url) as client:
            answer = await client.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert answer.ok, "the others serve as before"
        del mesh.children["decode-1"]
        (tmp_path / "decode-1.1.log").unlink()


async def test_groups_of_two_checkpoints_serve_one_model(tmp_path: Path) -> None:
    theirs = {"engine.block-size": 32}  # part of the identity of a fake's checkpoint
    flags = {"prefill-1": theirs, "decode-1": theirs}
    groups = [{"prefill-0", "decode-0"}, {"prefill-1", "decode-1"}]
    async with running_mesh(tmp_path, 2, 2, flags=flags) as mesh, ApiClient(mesh.url) as client:
        served = [0, 0]
        for _ in range(ENOUGH):
            answer = await client.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert answer.ok, answer.error
            workers = {answer.prefill_worker, answer.decode_worker}
            (number,) = [index for index, group in enumerate(groups) if workers <= group]
            served[number] += 1
        assert all(served), "both have got requests, and no request both of them"
        await mesh.idle()
