from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvmesh.core.types import SamplingParams
from kvmesh.engine import sampler
from kvmesh.engine.logits import apply_penalties
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.sampler import sample, score_tokens, top_threshold

VOCAB_SIZE = 40


def chunk(tokens: Sequence[int] = (1,), num_prompt_tokens: int = 1, **params: Any) -> SequenceChunk:
    return SequenceChunk(
        sequence_id=0,
        token_ids=list(tokens),
        start=len(tokens) - 1,
        end=len(tokens),
        block_table=[0],
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(**params),
        sample=True,
        eos_token_ids=frozenset({0}),
    )


def choose(logits: list[float], request: SequenceChunk) -> int:
    return sample(torch.tensor([logits]), [request])[0].token_id


def draws(logits: list[float], count: int = 4000, **params: Any) -> Counter[int]:
    chunks = [chunk(seed=seed, **params) for seed in range(count)]
    tokens = sample(torch.tensor(logits).repeat(count, 1), chunks)
    return Counter(token.token_id for token in tokens)


def test_temperature_zero_is_argmax() -> None:
    assert choose([0.0, 3.0, 2.0], chunk(temperature=0.0, seed=5, top_k=2)) == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30])
def test_a_temperature_near_zero_is_argmax(temperature: float) -> None:
    logits = [1.0, 30.0, 29.0]
    assert choose(logits, chunk(temperature=temperature, seed=5)) == 1
    assert choose(logits, chunk(temperature=temperature, seed=5, top_p=0.5)) == 1
    assert choose([-3.0, -2.0, -4.0], chunk(temperature=temperature, min_p=0.1)) == 1


def test_draws_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    expected = torch.softmax(torch.tensor(logits) / 0.8, dim=0)
    found = draws(logits, temperature=0.8)
    for token, probability in enumerate(expected.tolist()):
        assert abs(found[token] / 4000 - probability) < 0.03


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {2, 1}),
        ({"top_k": 1}, {2}),
        ({"top_p": 0.6}, {2}),  # 0.644 alone
        ({"top_p": 0.7}, {2, 1}),
        ({"top_p": 1e-9}, {2}),
        ({"min_p": 0.3}, {2, 1}),  # 0.237 / 0.644 = 0.37, 0.087 / 0.644 = 0.14
        ({"min_p": 0.1, "top_p": 0.99999}, {2, 1, 0}),
        # 0.731 of what top_k left, 0.644 of everything: top_p counts after top_k.
        ({"top_k": 2, "top_p": 0.7}, {2}),
        ({"top_k": 100}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_filters(params: dict[str, Any], kept: set[int]) -> None:
    assert set(draws([0.0, 1.0, 2.0, -1.0], **params)) == kept


def test_ties_at_the_threshold_are_kept() -> None:
    # Otherwise the choice would follow a device's order among equals.
    assert set(draws([1.0, 2.0, 1.0, 1.0, -9.0], top_k=2)) == {0, 1, 2, 3}


def test_top_p_over_more_tokens_than_candidates() -> None:
    # Flat over 5000 tokens: the best 1024 reach only a fifth, so all have to be sorted.
    logits = torch.linspace(0, 1e-3, 5000).repeat(3, 1)
    params = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.1), SamplingParams(top_k=3)]
    lowest = top_threshold(logits, params)
    kept = (logits >= lowest).sum(dim=-1).tolist()
    assert kept[2] == 3
    assert abs(kept[0] - 2500) < 10
    assert abs(kept[1] - 500) < 10


def test_a_row_is_chosen_as_if_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, VOCAB_SIZE) * 2
    chunks = [
        chunk(temperature=0.0),
        chunk(seed=1),
        chunk(seed=2, top_k=5),
        chunk(seed=3, top_p=0.7),
        chunk(seed=4, top_k=9, top_p=0.5, temperature=2.0),
        chunk(seed=5, min_p=0.1),
        chunk([1, 2, 2, 3], 2, seed=6, repetition_penalty=1.5, frequency_penalty=0.5),
        chunk(seed=7, min_tokens=3, num_logprobs=4),
    ]
    together = [token.token_id for token in sample(logits.clone(), chunks)]
    alone = [sample(logits[[row]], [chunks[row]])[0].token_id for row in range(8)]
    assert together == alone


def test_noise_is_keyed_by_seed_and_position() -> None:
    logits = [0.0] * VOCAB_SIZE
    base = choose(logits, chunk([1] * 5, seed=1))
    assert choose(logits, chunk([2] * 5, num_prompt_tokens=3, seed=1)) == base
    by_position = {choose(logits, chunk([1] * length, seed=1)) for length in range(1, 30)}
    by_seed = {choose(logits, chunk([1] * 5, seed=seed)) for seed in range(30)}
    assert len(by_position) > 10
    assert len(by_seed) > 10


def test_penalties() -> None:
    # Prompt 1, 2; output 2, 3, 3.
    seen = chunk(
        [1, 2, 2, 3, 3],
        num_prompt_tokens=2,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    row = torch.tensor([4.0, 4.0, -4.0, 4.0])
    apply_penalties(row, seen)
    assert row.tolist() == [4.0, 2.0, -8.0 - 0.75, 2.0 - 1.0]


def test_penalties_reach_greedy_choice() -> None:
    assert choose([0.0, 1.0, 0.9], chunk([1, 1], temperature=0.0, frequency_penalty=0.2)) == 2


@pytest.mark.parametrize(
    ("tokens", "params", "token"),
    [
        ([9], {"min_tokens": 2}, 2),  # eos 0 and stop 1 are best, none generated yet
        ([9, 9], {"min_tokens": 2}, 2),
        ([9, 9, 9], {"min_tokens": 2}, 0),  # two generated: the third may end it
        ([9], {"min_tokens": 2, "ignore_eos": True}, 0),  # eos ends nothing, so it is allowed
        ([9], {}, 0),
    ],
    ids=str,
)
def test_minimum_length(tokens: list[int], params: dict[str, Any], token: int) -> None:
    request = chunk(tokens, temperature=0.0, stop_token_ids=(1, 10**6), **params)
    assert choose([3.0, 2.0, 1.0], request) == token


def test_logprobs_are_of_the_models_own_logits() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    chunks = [
        chunk(temperature=0.1, top_k=1, num_logprobs=2),
        chunk(temperature=0.0, num_logprobs=-1),
        chunk([2, 2], temperature=0.0, frequency_penalty=5.0, num_logprobs=0),
        chunk(temperature=0.0, num_logprobs=100),
    ]
    first, second, third, fourth = sample(torch.tensor(logits).repeat(4, 1), chunks)
    exact = torch.log_softmax(torch.tensor(logits), dim=0).tolist()
    assert first.logprobs is not None
    assert first.logprobs.top_ids == (2, 1)
    assert first.logprobs.top_logprobs == pytest.approx((exact[2], exact[1]))
    assert first.logprobs.logprob == pytest.approx(exact[2])
    assert second.logprobs is None
    assert third.token_id == 1
    assert third.logprobs is not None
    assert third.logprobs.logprob == pytest.approx(exact[1])
    assert third.logprobs.top_ids == ()
    assert fourth.logprobs is not None
    assert fourth.logprobs.top_ids == (2, 1, 0, 3)
    assert math.isclose(sum(map(math.exp, fourth.logprobs.top_logprobs)), 1, rel_tol=1e-5)


def test_given_tokens_are_scored_with_their_ranks() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    raw = torch.log_softmax(logits, dim=-1)
    first, second = score_tokens(logits, [2, 0], 2)
    assert (first.rank, first.top_ids) == (2, (1, 2))
    assert first.logprob == pytest.approx(raw[0, 2].item())
    assert first.top_logprobs == pytest.approx((raw[0, 1].item(), raw[0, 2].item()))
    assert second.rank == 1
    assert second.logprob == pytest.approx(raw[1, 0].item())


class AnyToken:
    """A structure that allows even tokens."""

    ready = True

    def allowed(self, generated: Sequence[int]) -> npt.NDArray[np.bool_]:
        return np.array([token % 2 == 0 for token in range(VOCAB_SIZE)])


EVERYTHING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "num_logprobs": 3},
    {"seed": 1, "top_p": 0.9, "num_logprobs": 0},
    {"seed": 2, "top_k": 5, "min_p": 0.1},
    {"seed": 3, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"seed": 4, "logit_bias": ((3, 1.0),), "bad_words": ((5,), (1, 6)), "presence_penalty": 0.5},
    {"seed": 5, "allowed_token_ids": (4, 8, 9), "min_tokens": 9, "stop_token_ids": (8,)},
]


def test_choosing_looks_at_no_value_where_that_means_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = [chunk((1, 2, 1), **params) for params in EVERYTHING]
    chunks.append(replace(chunks[6], constraint=AnyToken()))
    logits = torch.randn(len(chunks), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    wanted = sample(logits.clone(), chunks)
    monkeypatch.setattr(sampler, "looks_at_values", lambda _: False)
    for found, token in zip(sample(logits.clone(), chunks), wanted, strict=True):
        assert found.token_id == token.token_id
    # Tensors without values: whoever looks at one fails.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        chosen = sampler.choose(mode.from_tensor(logits), chunks)
    assert chosen.tokens.shape == (len(chunks),)
    assert chosen.logprobs is not None
    assert [len(each) for each in chosen.logprobs] == [2, 2, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_forbids_every_token_ends_with_an_error(temperature: float) -> None:
    hopeless = chunk(
        temperature=temperature, seed=1, allowed_token_ids=(1,), bad_words=((1,),), num_logprobs=0
    )
    free = chunk(temperature=temperature, seed=1, allowed_token_ids=(2,))
    found = sample(torch.zeros(2, VOCAB_SIZE), [hopeless, free])
    assert found[0].error == "the request forbids every token that could come next"
    assert (found[1].token_id, found[1].error) == (2, "")


def test_infinite_biases_and_forbidden_ends_are_told_too() -> None:
    every = tuple((token, -math.inf) for token in range(VOCAB_SIZE))
    biased = chunk(temperature=0.0, logit_bias=every)
    ended = chunk(temperature=0.0, allowed_token_ids=(0,), min_tokens=5)
    assert all(token.error for token in sample(torch.zeros(2, VOCAB_SIZE), [biased, ended]))


@pytest.mark.parametrize("damage", [math.nan, math.inf])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_logits_that_are_no_numbers_are_a_fault_of_the_engine(
    damage: float, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "looks_at_values", lambda _: on_cpu)
    requests = [
        chunk(temperature=0.0),
        chunk(temperature=1.0, seed=3),
        chunk(temperature=1.0, seed=3, top_k=5, top_p=0.9, num_logprobs=2),
        chunk([1, 2], temperature=0.0, frequency_penalty=0.5),
    ]
    well = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    ill = well.clone()
    ill[:, 5] = damage
    assert all(each.damaged for each in sample(ill, requests))
    beside = torch.cat([well, torch.full((1, VOCAB_SIZE), damage)])
    found = sample(beside, [*requests, chunk(temperature=0.0)])
    assert [each.damaged for each in found] == [False] * len(requests) + [True]
    assert found[:-1] == sample(well.clone(), requests), "one row is no other row's affair"


def test_a_request_that_asks_for_an_infinite_logit_is_no_fault_of_the_engine() -> None:
    wanted = chunk(temperature=0.0, logit_bias=((3, math.inf),))
    (found,) = sample(torch.zeros(1, VOCAB_SIZE), [wanted])
    assert (found.token_id, found.damaged) == (3, False)
