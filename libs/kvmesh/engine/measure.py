"""Measures prefill and decode steps on a runner, as the step loop would run them.

Needs the runner only, no services. Tests: tests/integration/test_profile_command.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import ModelRunner, SequenceChunk, StateChunk
from kvmesh.kv.groups import arriving_blocks, num_blocks_of

_GREEDY = SamplingParams(temperature=0.0)


class Stage:
    """Sequences with blocks of their own and arbitrary KV.

    Args:
        lengths: tokens of each sequence.

    Raises:
        ValueError: the pool has too few blocks.
    """

    def __init__(self, runner: ModelRunner, lengths: list[int]) -> None:
        spec = runner.spec
        free = iter(range(runner.kv.num_blocks))
        needed = sum(blocks_of(runner, length) for length in lengths)
        if needed > runner.kv.num_blocks:
            raise ValueError(f"{needed} blocks are needed, {runner.kv.num_blocks} are there")
        self._runner = runner
        self._tokens = [
            [1 + position % (spec.vocab_size - 1) for position in range(length)]
            for length in lengths
        ]
        size = spec.layout.block_size
        self._tables = [
            [_take(free, num_blocks_of(length, size)) for _ in spec.groups.windows]
            for length in lengths
        ]
        self._states = [_take(free, spec.groups.state_blocks) for _ in lengths]

    def run(self, starts: list[int], ends: list[int]) -> float:
        """Computes these positions in one step; returns its seconds."""
        chunks = [self._chunk(i, *span) for i, span in enumerate(zip(starts, ends, strict=True))]
        started = time.perf_counter()
        self._runner.execute(chunks)
        return time.perf_counter() - started

    def _chunk(self, index: int, start: int, end: int) -> SequenceChunk:
        tokens, tables, state = self._tokens[index], self._tables[index], self._states[index]
        return SequenceChunk(
            sequence_id=index,
            token_ids=tokens,
            start=start,
            end=end,
            block_table=tables[0],
            num_prompt_tokens=len(tokens),
            sampling=_GREEDY,
            sample=end == len(tokens),
            more_tables=tables[1:],
            state=StateChunk(state, state if start else []) if state else None,
        )


def _take(free: Iterator[int], count: int) -> list[int]:
    return [next(free) for _ in range(count)]


def blocks_of(runner: ModelRunner, length: int) -> int:
    """Returns the number of blocks of a sequence if no window's blocks are given back."""
    spec = runner.spec
    whole = num_blocks_of(length, spec.layout.block_size)
    return whole * len(spec.groups.windows) + spec.groups.state_blocks


def prefill_seconds(
    runner: ModelRunner, tokens: int, cached: int, max_step_tokens: int, *, fills: bool = True
) -> float:
    """Returns the seconds to compute `tokens` after `cached` positions, in budgeted steps.

    Args:
        fills: computes the cached positions first, so that attention reads finite numbers. Without
            it, attention reads the KV of earlier calls.

    Raises:
        ValueError: the pool has too few blocks.
    """
    stage = Stage(runner, [cached + tokens])
    bounds = [*range(cached, cached + tokens, max_step_tokens), cached + tokens]
    for start in range(0, cached if fills else 0, max_step_tokens):
        stage.run([start], [min(start + max_step_tokens, cached)])
    return sum(stage.run([start], [end]) for start, end in itertools.pairwise(bounds))


def decode_seconds(
    runner: ModelRunner, batch: int, context: int, max_step_tokens: int, *, fills: bool = True
) -> float:
    """Returns the seconds of a step in which each of `batch` sequences decodes one token.

    Args:
        fills: see `prefill_seconds`.

    Raises:
        ValueError: the pool has too few blocks.
    """
    stage = Stage(runner, [context] * batch)
    share = max(1, max_step_tokens // batch)
    for start in range(0, context - 1 if fills else 0, share):
        stage.run([start] * batch, [min(start + share, context - 1)] * batch)
    # The first step of a batch is not measured: its memory is cold.
    stage.run([context - 1] * batch, [context] * batch)
    return stage.run([context - 1] * batch, [context] * batch)


def handoff_bytes(runner: ModelRunner, tokens: int) -> dict[str, int]:
    """Returns the bytes that the handoff of a prompt moves: `total`, and per kind of group."""
    spec = runner.spec
    groups, size, block_bytes = spec.groups, spec.layout.block_size, spec.layout.block_bytes
    count = num_blocks_of(tokens, size)
    found = {"total": 0}
    # Block ids are the group numbers here, to tell the groups apart.
    tables = [[group] * count for group in range(len(groups.windows))]
    state = [len(tables)] * groups.state_blocks
    for each in arriving_blocks(groups, tables, state, range(count), tokens, size):
        window = groups.windows[each.block] if each.block < len(tables) else None
        name = "state" if window is None else f"window {window}" if window else "full"
        found[name] = found.get(name, 0) + block_bytes
        found["total"] += block_bytes
    return found
