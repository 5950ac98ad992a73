"""Tokens over HTTP equal those of transformers, and do not depend on where a request runs."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.e2e.api_client import Answer, ApiClient, placed
from tests.mesh_processes import BLOCK_SIZE, MODEL_FOLDER, Mesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BOTH = ("disaggregated", "aggregated")
NUM_TOKENS = 24
STARTS = itertools.count(400)


class Oracle:
    """The embedded model as transformers runs it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        factory: Any = AutoModelForCausalLM
        self._model = factory.from_pretrained(MODEL_FOLDER, dtype=torch.float32).eval()
        # No end of sequence, whatever the checkpoint says.
        config: Any = GenerationConfig
        self._model.generation_config = config(do_sample=False, pad_token_id=3)

    def continue_greedily(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens
        )
        found: list[int] = out[0, len(prompt) :].tolist()
        return found


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def source_ids() -> list[int]:
    """Tokens of real source text, for prompts."""
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(inspect.getsource(random)).ids
    return ids


async def ask(client: ApiClient, prompt: list[int], where: str, **body: Any) -> Answer:
    answer = await client.complete(
        prompt, headers=placed(where), **{"max_tokens": NUM_TOKENS, "ignore_eos": True, **body}
    )
    assert answer.ok, answer.error
    assert answer.headers["x-kvmesh-placement"] == where
    apart = answer.prefill_worker != answer.decode_worker
    assert apart == (where == "disaggregated")
    return answer


@pytest.mark.parametrize("where", BOTH)
@pytest.mark.parametrize("length", [1, BLOCK_SIZE, 100])
async def test_greedy_tokens_are_those_of_transformers(
    torch_client: ApiClient, oracle: Oracle, source_ids: list[int], where: str, length: int
) -> None:
    prompt = source_ids[length : 2 * length]
    answer = await ask(torch_client, prompt, where)
    assert answer.token_ids == oracle.continue_greedily(prompt)
    assert answer.usage["prompt_tokens"] == length
    assert answer.usage["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("where", BOTH)
async def test_long_prompts_in_chunks_and_with_a_cached_prefix(
    torch_client: ApiClient, oracle: Oracle, source_ids: list[int], where: str
) -> None:
    start = next(STARTS)  # no blocks in common with the other case, or with an earlier try
    prompt = source_ids[start : start + 1500]
    expected = oracle.continue_greedily(prompt)
    first = await ask(torch_client, prompt, where)
    assert (first.token_ids, first.cached_tokens) == (expected, 0)
    again = await ask(torch_client, prompt, where)
    assert again.token_ids == expected
    assert again.cached_tokens == 1500 // BLOCK_SIZE * BLOCK_SIZE
    assert again.prefill_worker == first.prefill_worker


async def test_a_mixed_batch_changes_nothing(
    torch_mesh: Mesh, torch_client: ApiClient, oracle: Oracle, source_ids: list[int]
) -> None:
    prompts = [source_ids[i * 37 : i * 37 + 5 + 23 * i] for i in range(10)]
    expected = [oracle.continue_greedily(prompt) for prompt in prompts]
    answers = await asyncio.gather(
        *(ask(torch_client, prompt, BOTH[i % 2]) for i, prompt in enumerate(prompts))
    )
    assert [answer.token_ids for answer in answers] == expected
    await torch_mesh.idle()


async def test_a_seeded_request_draws_the_same_tokens_everywhere(
    torch_client: ApiClient, source_ids: list[int]
) -> None:
    prompt = source_ids[200:260]
    body = {"temperature": 0.8, "seed": 11, "logprobs": 2}
    alone = [await ask(torch_client, prompt, where, **body) for where in (*BOTH, *BOTH)]
    others = [ask(torch_client, source_ids[i : i + 90], BOTH[i % 2], seed=i) for i in range(4)]
    together = await asyncio.gather(
        *(ask(torch_client, prompt, where, **body) for where in BOTH), *others
    )
    reference = alone[0].only
    for answer in (*alone[1:], *together[:2]):
        assert_same(answer, alone[0])
    other_seed = await ask(torch_client, prompt, "aggregated", **{**body, "seed": 12})
    assert other_seed.token_ids != reference.token_ids


async def test_choices_differ_and_have_stable_seeds(
    torch_client: ApiClient, source_ids: list[int]
) -> None:
    prompt = source_ids[300:340]
    two = [await ask(torch_client, prompt, where, n=2, temperature=1.0, seed=5) for where in BOTH]
    first, second = (two[0].choices[i].token_ids for i in range(2))
    assert first != second
    assert [two[1].choices[i].token_ids for i in range(2)] == [first, second]
    # The second choice is the next seed's: a caller can ask for it alone.
    alone = await ask(torch_client, prompt, "aggregated", temperature=1.0, seed=6)
    assert alone.token_ids == second


def assert_same(found: Answer, expected: Answer) -> None:
    one, other = found.only, expected.only
    assert (one.token_ids, one.text, one.finish_reason) == (
        other.token_ids,
        other.text,
        other.finish_reason,
    )
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert [set(top) for top in one.top_logprobs] == [set(top) for top in other.top_logprobs]


MATRIX: dict[str, dict[str, Any]] = {
    "greedy": {},
    "filters": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {
        "presence_penalty": 1.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.5,
    },
    "logprobs": {"logprobs": 5},
    "max_tokens_1": {"max_tokens": 1, "logprobs": 1},
    "ignore_eos": {"temperature": 1.5, "seed": 9, "max_tokens": 60},
    "eos": {"temperature": 1.5, "seed": 9, "max_tokens": 60, "ignore_eos": False},
}


@pytest.mark.parametrize("name", MATRIX)
async def test_placement_does_not_show(
    torch_client: ApiClient, source_ids: list[int], name: str
) -> None:
    prompt = source_ids[500:570]
    apart, together = [await ask(torch_client, prompt, where, **MATRIX[name]) for where in BOTH]
    assert_same(together, apart)
    limit = MATRIX[name].get("max_tokens", NUM_TOKENS)
    if name != "eos":
        assert (len(apart.token_ids), apart.only.finish_reason) == (limit, "length")
    if name == "penalties":
        plain = await ask(torch_client, prompt, "aggregated")
        assert plain.token_ids != apart.token_ids
    if "logprobs" in MATRIX[name]:
        assert len(apart.only.logprobs) == limit
        assert all(len(top) == MATRIX[name]["logprobs"] for top in apart.only.top_logprobs)


async def test_stopping_does_not_depend_on_placement(
    torch_client: ApiClient, source_ids: list[int]
) -> None:
    prompt = source_ids[600:680]
    free = (await ask(torch_client, prompt, "disaggregated")).only
    stop_id = free.token_ids[6]
    stop_at = free.token_ids.index(stop_id)
    stop_string = free.text[12:16]
    cases: list[dict[str, Any]] = [
        {"stop": [stop_string]},
        {"stop": [stop_string], "include_stop_str_in_output": True},
        {"stop_token_ids": [stop_id]},
        {"stop_token_ids": [stop_id], "min_tokens": stop_at + 4},
    ]
    for case in cases:
        apart, together = [await ask(torch_client, prompt, where, **case) for where in BOTH]
        assert_same(together, apart)
        found = apart.only
        if "stop" in case:
            end = free.text.index(stop_string)
            end += len(stop_string) * ("include_stop_str_in_output" in case)
            assert (found.text, found.finish_reason) == (free.text[:end], "stop")
        elif "min_tokens" in case:
            assert len(found.token_ids) >= stop_at + 4
            assert stop_id not in found.token_ids[: stop_at + 4]
        else:
            assert found.finish_reason == "stop"
            assert found.token_ids[:stop_at] == free.token_ids[:stop_at]
            assert len(found.token_ids) <= stop_at + 1


async def test_streaming_gives_the_same_as_a_whole_answer(
    torch_client: ApiClient, source_ids: list[int]
) -> None:
    prompt = source_ids[700:750]
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.7, "seed": 1, "logprobs": 1}
    whole = await torch_client.complete(prompt, **body)
    streamed = await torch_client.streamed(prompt, **body)
    assert_same(streamed, whole)
    assert streamed.usage["completion_tokens"] == whole.usage["completion_tokens"]
