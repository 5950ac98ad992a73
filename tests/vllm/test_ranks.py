"""Workers of two ranks: they say what one rank says, and share KV with workers of any number."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.api_client import Answer, ApiClient, placed
from tests.mesh_child import Child
from tests.mesh_processes import MODEL_FOLDER, Mesh, running_mesh
from tests.vllm.oracle import VllmAlone, some_prompts
from tests.vllm.said_by import GREEDY, PROMPTS, said_by
from tests.vllm.streams import Load, undisturbed
from tests.vllm_engine import BLOCK_SIZE, write_adapter
from tests.waiting import until

VLLM = {"engine.block-size": BLOCK_SIZE, "engine.num-blocks": 400}
TWO_RANKS = {**VLLM, "engine.tensor-parallel": 2}
TWO_STAGES = {**VLLM, "engine.pipeline-parallel": 2}
FEW_TOKENS = 12
BLOCK_BYTES = 6 * 4 * BLOCK_SIZE * 2 * 32 * 4
"""Layers, KV heads, positions, key and value of a head, bytes of a float32."""
ENDS_S = 3.0


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    """What an engine of one rank says."""
    return said_by(1)


def test_one_rank_says_what_vllm_says(one_rank: dict[str, Any]) -> None:
    alone = VllmAlone(MODEL_FOLDER, "float32")
    assert one_rank["greedy"] == alone.greedy(PROMPTS, GREEDY.max_tokens)


@pytest.mark.parametrize(
    ("wait", "stages"),
    [
        ("sockets", 1),
        ("memory", 1),
        ("sockets", 2),
        ("devices", 1),
        ("devices", 2),
        ("hosts", 1),
        ("hosts", 2),
    ],
)
def test_two_ranks_say_what_one_says(one_rank: dict[str, Any], wait: str, stages: int) -> None:
    """They share each layer by heads, or have half of the layers each.

    KV is in one pool, or with `devices` and `hosts` in memory of each rank.
    """
    two = said_by(2, wait, stages=stages)
    for name in ("greedy", "drawn", "chunked"):
        assert two[name] == one_rank[name], name
    assert one_rank["chunked"] == one_rank["drawn"][:4]
    assert two["scores"] == pytest.approx(one_rank["scores"], abs=1e-4)
    # The KV of each head and layer is where an engine of one rank has it.
    assert len(two["pool"]) == len(one_rank["pool"])
    assert two["pool"] == pytest.approx(one_rank["pool"], abs=1e-4)


def test_adapters_say_on_two_ranks_what_they_say_on_one(tmp_path: Path) -> None:
    """One of them is there from the start, and one is loaded between two steps.

    The other rank is on another host. What it cannot load, the leader does not keep either.
    """
    adapters = [
        write_adapter(tmp_path / str(seed), seed, hidden=256, queries=256, values=128, layers=6)
        for seed in range(2)
    ]
    one = said_by(1, adapters=adapters)
    assert len({str(one[name]) for name in ("0", "1", "2")}) == 3
    assert one["again"] == one["2"]
    two = said_by(2, "hosts", adapters=adapters)
    refusal = two.pop("refusal")
    assert refusal.startswith("rank 1: ")
    assert "gone/adapter_model.safetensors" in refusal
    assert two == one


async def test_workers_of_any_number_of_ranks_share_kv_and_outlive_a_lost_rank(
    tmp_path: Path,
) -> None:
    """A decode worker dies twice: first a rank of it, then its leader in the middle of a step."""
    prompts = some_prompts(16, 200, seed=5)
    flags = {"prefill-0": TWO_STAGES, "prefill-1": VLLM, "decode-0": TWO_RANKS, "decode-1": VLLM}
    async with (
        running_mesh(tmp_path, 2, 2, engine="vllm", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        victim = mesh["decode-0"]
        async with asyncio.TaskGroup() as clients:
            load = Load(client, prompts)
            for number in range(4):
                clients.create_task(load.run(number))
            await until(lambda: len(pairs_of(load)) == 4, "each with each", 240)
            (follower,) = ranks_of(victim)
            os.kill(follower, signal.SIGKILL)
            await until(lambda: not victim.running, "its worker ends", ENDS_S)
            assert "rank_lost" in victim.log_path.read_text()
            victim.log_path.write_text("")  # an error, and one that was meant
            await load.more(4)
            await mesh.restart("decode-0")
            await mesh.all_known()
            await load.more(8)
            (follower,) = ranks_of(victim)
            victim.kill()
            await until(lambda: not Path(f"/proc/{follower}").exists(), "its rank ends", ENDS_S)
            await load.more(4)
            load.stopping = True
        await mesh.idle()
    expected = undisturbed(prompts)
    for index, answer in load.answers:
        assert answer.ok, (answer.status, answer.error)
        assert answer.token_ids == expected[index], f"prompt {index}"


async def test_bytes_between_unequal_ranks_are_those_between_single_ranks(tmp_path: Path) -> None:
    """Workers of one rank and of two, each with each: every block is sent once, and whole.

    A request that a worker loses is computed and sent again. So these count for their tokens alone.
    """
    prompts = some_prompts(80, 300, seed=9)
    flags = {"prefill-0": VLLM, "prefill-1": TWO_RANKS, "decode-0": VLLM, "decode-1": TWO_RANKS}
    answers: list[Answer] = []
    async with (
        running_mesh(tmp_path, 2, 2, engine="vllm", flags=flags) as mesh,
        ApiClient(mesh.url) as client,
    ):
        # Prompts share nothing, so no worker has any of their blocks.
        for first in range(0, len(prompts), 4):
            asked = [
                client.complete(
                    prompts[seed],
                    headers=placed("disaggregated") | {"x-request-id": f"number{seed}"},
                    temperature=1.0,
                    seed=seed,
                    max_tokens=FEW_TOKENS,
                    ignore_eos=True,
                )
                for seed in range(first, first + 4)
            ]
            answers += await asyncio.gather(*asked)
        await mesh.idle()
    expected = undisturbed(prompts, FEW_TOKENS, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == expected
    sent, lost = sent_by_request(mesh), lost_requests(mesh)
    pairs: Counter[tuple[str, str]] = Counter()
    for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if (name := f"number{seed}") in lost:
            continue
        num_bytes = -(-len(prompt) // BLOCK_SIZE) * BLOCK_BYTES
        assert sent[name] == [(answer.prefill_worker, num_bytes)], f"prompt {seed}"
        pairs[answer.prefill_worker, answer.decode_worker] += 1
    assert len(pairs) == 4, "each has sent to each"


def sent_by_request(mesh: Mesh) -> dict[str, list[tuple[str, int]]]:
    """Prefill workers and bytes of all handoffs of a mesh that has ended, by request."""
    found: dict[str, list[tuple[str, int]]] = {}
    for path in mesh.trace_files:
        for line in path.read_text().splitlines():
            span = json.loads(line)
            told = span["attributes"]
            if span["name"] == "prefill.request" and told.get("outcome") == "handed_off":
                handoffs = found.setdefault(called(told["request_id"]), [])
                handoffs.append((told["worker_id"], told["transfer_bytes"]))
    return found


def lost_requests(mesh: Mesh) -> set[str]:
    """Requests that moved to another worker."""
    lost = [each for each in mesh["gateway"].events() if each["event"] == "request_lost_by_worker"]
    return {called(each["request_id"]) for each in lost}


def called(request_id: str) -> str:
    """The name that the client gave a request."""
    return request_id.partition("-")[0]


def pairs_of(load: Load) -> set[tuple[str, str]]:
    """Prefill and decode workers of what was answered."""
    return {(answer.prefill_worker, answer.decode_worker) for _, answer in load.answers}


def ranks_of(worker: Child) -> list[int]:
    """Processes of a worker's other ranks."""
    assert worker.process is not None
    tasks = Path(f"/proc/{worker.process.pid}/task").iterdir()
    pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return [
        int(pid) for pid in pids if b"vllm_follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
