"""A repeated prompt computes only what is not cached, where it is cached, and says so."""

from __future__ import annotations

import itertools
import random

from tests.e2e.api_client import ApiClient
from tests.mesh_processes import BLOCK_SIZE, VOCAB_SIZE, Mesh, fake_tokens

NEW_SEEDS = itertools.count(1000)
"""Of prompts that nobody has seen, also if the test runs again in the same mesh."""

ANSWER_TOKENS = 40
"""Many steps: the index knows the prompt's blocks before the answer is complete."""


def a_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(f"prefix {seed}")
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


async def computed_tokens(mesh: Mesh) -> float:
    """Prompt tokens that prefill workers computed so far."""
    total = 0.0
    for worker in mesh.workers:
        if worker.service == "prefill":
            metrics = await worker.metrics()
            total += metrics.value("vllm:prefix_cache_queries_total")
            total -= metrics.value("vllm:prefix_cache_hits_total")
    return total


async def test_a_repeated_prompt_goes_where_its_prefix_is_and_computes_only_the_rest(
    fake_mesh: Mesh, fake_client: ApiClient
) -> None:
    num_there = 0
    for _ in range(5):
        prompt = a_prompt(next(NEW_SEEDS), 20 * BLOCK_SIZE + 5)
        first = await fake_client.complete(prompt, max_tokens=ANSWER_TOKENS)
        assert first.token_ids == fake_tokens(prompt, ANSWER_TOKENS)
        assert first.cached_tokens == 0
        await fake_mesh.idle()
        before = await computed_tokens(fake_mesh)
        again = await fake_client.complete(prompt, max_tokens=ANSWER_TOKENS)
        assert again.token_ids == first.token_ids
        assert again.cached_tokens == 20 * BLOCK_SIZE
        num_there += again.prefill_worker == first.prefill_worker
        assert await computed_tokens(fake_mesh) - before == 5
    # The scheduler may learn late that the worker is idle; another one then fetches the prefix.
    assert num_there >= 4


async def test_the_next_turn_of_a_conversation_reuses_the_one_before(
    fake_client: ApiClient,
) -> None:
    prompt = a_prompt(10, 8 * BLOCK_SIZE)
    first = await fake_client.complete(prompt, max_tokens=ANSWER_TOKENS)
    longer = prompt + first.token_ids + a_prompt(11, 30)
    second = await fake_client.complete(longer, max_tokens=4)
    assert second.token_ids == fake_tokens(longer, 4)
    assert second.cached_tokens >= 8 * BLOCK_SIZE
    assert second.prefill_worker == first.prefill_worker


async def test_another_tenant_does_not_see_the_prefix(fake_client: ApiClient) -> None:
    prompt = a_prompt(20, 8 * BLOCK_SIZE)
    for salt in ("a", "b"):
        answer = await fake_client.complete(prompt, max_tokens=ANSWER_TOKENS, cache_salt=salt)
        assert answer.cached_tokens == 0
        assert answer.token_ids == fake_tokens(prompt, ANSWER_TOKENS)
