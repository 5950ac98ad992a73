from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.policy.batching import BatchLimits, ChunkPlan, plan_batch


def test_decode_comes_first_and_prompts_share_the_rest_in_order() -> None:
    plans = plan_batch([300, 1, 400, 1], BatchLimits(max_tokens=512, max_sequences=8))
    assert plans == [
        ChunkPlan(0, 300),
        ChunkPlan(1, 1),
        ChunkPlan(2, 210),
        ChunkPlan(3, 1),
    ]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan_batch([], BatchLimits()) == []
    assert plan_batch([0, 0], BatchLimits()) == []


def test_the_number_of_sequences_is_limited() -> None:
    plans = plan_batch([5, 5, 1], BatchLimits(max_tokens=100, max_sequences=2))
    assert plans == [ChunkPlan(0, 5), ChunkPlan(2, 1)]


def test_chunks_are_shorter_while_somebody_decodes() -> None:
    limits = BatchLimits(max_tokens=4096, max_sequences=8, mixed_tokens=512)
    assert plan_batch([5000], limits) == [ChunkPlan(0, 4096)]
    assert plan_batch([5000, 1, 1], limits) == [
        ChunkPlan(0, 510),
        ChunkPlan(1, 1),
        ChunkPlan(2, 1),
    ]


def test_the_last_token_of_the_budget_is_spent_and_no_more() -> None:
    assert plan_batch([1, 1], BatchLimits(max_tokens=1)) == [ChunkPlan(0, 1)]
    both = [ChunkPlan(0, 1), ChunkPlan(1, 1)]
    assert plan_batch([1, 5], BatchLimits(max_tokens=2)) == both
    assert plan_batch([1, 5], BatchLimits(max_tokens=1)) == both[:1]
    assert plan_batch([2], BatchLimits()) == [ChunkPlan(0, 2)]


def test_prompt_tokens_are_bounded_beside_decode_only() -> None:
    limits = BatchLimits(max_tokens=100)
    assert plan_batch([1, 500, 1], limits, 20) == [
        ChunkPlan(0, 1),
        ChunkPlan(1, 20),
        ChunkPlan(2, 1),
    ]
    assert plan_batch([500], limits, 20) == [ChunkPlan(0, 100)]


@given(
    st.lists(st.integers(0, 2000), max_size=40),
    st.integers(1, 1024),
    st.integers(1, 32),
)
def test_limits_hold_and_budget_is_not_wasted(
    remaining: list[int], max_tokens: int, max_sequences: int
) -> None:
    plans = plan_batch(remaining, BatchLimits(max_tokens, max_sequences))
    spent = sum(plan.num_tokens for plan in plans)
    assert spent <= max_tokens
    assert len(plans) <= max_sequences
    assert all(0 < plan.num_tokens <= remaining[plan.index] for plan in plans)
    if len(plans) < max_sequences:
        assert spent == min(max_tokens, sum(remaining))


def test_prompts_first_take_the_budget_and_decoding_joins_whole_or_not_at_all() -> None:
    limits = BatchLimits(max_tokens=100, max_sequences=4)
    assert plan_batch([1, 500, 1], limits, first=(1,)) == [ChunkPlan(1, 100)]
    assert plan_batch([1, 99, 1], limits, first=(1,)) == [ChunkPlan(1, 99)]
    whole = [ChunkPlan(0, 1), ChunkPlan(1, 98), ChunkPlan(2, 1)]
    assert plan_batch([1, 98, 1], limits, first=(1,)) == whole
    few = BatchLimits(max_tokens=100, max_sequences=2)
    assert plan_batch([1, 10, 1], few, first=(1,)) == [ChunkPlan(1, 10)]
    # Bounds beside decode are for those who decode; the last token of a prompt is no decode step.
    assert plan_batch([1, 500], limits, 20, first=(1,)) == [ChunkPlan(1, 100)]
    assert plan_batch([1, 500, 1], limits, first=(0, 1)) == [ChunkPlan(0, 1), ChunkPlan(1, 99)]
    assert plan_batch([1, 1], limits) == [ChunkPlan(0, 1), ChunkPlan(1, 1)]
