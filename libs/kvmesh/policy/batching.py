"""Chooses the tokens of the next step: continuous batching with chunked prefill. Pure.

Decode tokens come first, one per sequence, and the rest of the token budget goes to prompts in
chunks, oldest first; or the other way round. Tests: tests/unit/policy/test_batching.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one step.

    Attributes:
        max_tokens: tokens computed in one step, decode tokens included.
        max_sequences: sequences in one step.
        mixed_tokens: same as `max_tokens`, for a step in which a sequence decodes; None: equal to
            `max_tokens`. Long chunks use a device best, but every running answer waits for them.
    """

    max_tokens: int = 512
    max_sequences: int = 64
    mixed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Tokens of one sequence in the next step; `index` is its place in the caller's list."""

    index: int
    num_tokens: int


def plan_batch(
    remaining: Sequence[int],
    limits: BatchLimits,
    beside_decode: int | None = None,
    first: Collection[int] = (),
) -> list[ChunkPlan]:
    """Divides the step's budget.

    Args:
        remaining: per sequence, oldest first, the number of tokens without KV; 1 is a decode step.
        beside_decode: maximum number of prompt tokens in a step in which a sequence decodes; None:
            as many as the budget leaves.
        first: indices of prompts that take their tokens before sequences that decode. The others
            join the step if there is room for all of them, and else none does.

    Returns:
        One entry per sequence that takes part, in the order of the list. If decode comes first, a
        long prompt cannot starve it. A prompt starves only if decode alone fills the budget.
    """
    if first:
        return _prompts_first(remaining, limits, first)
    budget = limits.max_tokens
    shares: dict[int, int] = {}
    for index, tokens in enumerate(remaining):
        if tokens == 1 and budget > 0 and len(shares) < limits.max_sequences:
            shares[index] = 1
            budget -= 1
    if shares and limits.mixed_tokens is not None:
        budget = min(budget, limits.mixed_tokens - len(shares))
    if shares and beside_decode is not None:
        budget = min(budget, beside_decode)
    for index, tokens in enumerate(remaining):
        if tokens > 1 and budget > 0 and len(shares) < limits.max_sequences:
            shares[index] = min(tokens, budget)
            budget -= shares[index]
    return [ChunkPlan(index, shares[index]) for index in sorted(shares)]


def _prompts_first(
    remaining: Sequence[int], limits: BatchLimits, first: Collection[int]
) -> list[ChunkPlan]:
    budget = limits.max_tokens
    shares: dict[int, int] = {}
    for index in sorted(first):
        if budget > 0 and len(shares) < limits.max_sequences:
            shares[index] = min(remaining[index], budget)
            budget -= shares[index]
    decoding = [index for index in range(len(remaining)) if index not in first]
    if len(decoding) <= min(budget, limits.max_sequences - len(shares)):
        shares |= dict.fromkeys(decoding, 1)
    return [ChunkPlan(index, shares[index]) for index in sorted(shares)]
