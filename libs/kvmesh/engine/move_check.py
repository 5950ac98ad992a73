"""Checks, before a worker serves from a device, that a sequence goes on after its KV has moved.

With vLLM, kernels of others decide where in a block they read and write. If they kept anything
elsewhere, streams would go on with wrong tokens after a handoff, on every request and unnoticed.

Tests: tests/unit/engine/test_move_check.py, tests/vllm/test_device_pool.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import SamplingParams
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.divided_pool import DividedPool
from kvmesh.engine.protocol import ModelRunner, SequenceChunk, StateChunk
from kvmesh.kv.groups import num_blocks_of
from kvmesh.transfer.device import pieces_of
from kvmesh.transfer.memory import create_shared

NEW_TOKENS, MOVED_AFTER = 8, 3
_SAMPLING = SamplingParams(
    temperature=0.9, seed=5, top_k=50, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True
)


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of one sequence.

    Attributes:
        tables: block table of each token group, as long as all its tokens need.
        state: blocks of its state.
    """

    tables: Sequence[Sequence[int]]
    state: Sequence[int] = ()

    @property
    def all(self) -> list[int]:
        """All of them."""
        return [block for table in (*self.tables, self.state) for block in table]


class CheckedSequence:
    """A sequence that a check computes."""

    def __init__(
        self,
        runner: ModelRunner,
        number: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        blocks: HeldBlocks,
        max_tokens: int,
    ) -> None:
        """Computes nothing yet.

        Args:
            number: id of the sequence, unlike that of any other of the runner.
            max_tokens: maximum number of positions of one step.
        """
        self._runner, self._number, self._sampling = runner, number, sampling
        self._blocks = blocks
        self._tokens = list(prompt)
        self._num_prompt = len(self._tokens)
        self._max_tokens = max_tokens
        self._computed = 0

    def tokens(self, count: int) -> list[int]:
        """Goes on until there are `count` tokens after the prompt, and returns them."""
        while len(self._tokens) < self._num_prompt + count:
            end = min(len(self._tokens), self._computed + self._max_tokens)
            (token,) = self._runner.execute([self._chunk(end)]).tokens
            self._computed = end
            if token is not None:
                self._tokens.append(token.token_id)
        return self._tokens[self._num_prompt :]

    def _chunk(self, end: int) -> SequenceChunk:
        table, *more = self._blocks.tables
        live = self._blocks.state
        return SequenceChunk(
            self._number,
            self._tokens,
            self._computed,
            end,
            table,
            self._num_prompt,
            self._sampling,
            sample=end == len(self._tokens),
            more_tables=more,
            state=StateChunk(live, live if self._computed else ()) if live else None,
        )

    def moved(
        self, number: int, blocks: HeldBlocks, pool: DeviceKvPool | DividedPool
    ) -> CheckedSequence:
        """Ends this sequence and returns it with another number, in other blocks.

        The blocks' bytes go through the host; the blocks that they leave are set to zeros.

        Raises:
            LostError: the device failed.
        """
        block_bytes, count = self._runner.spec.layout.block_bytes, len(blocks.all)
        other = CheckedSequence(
            self._runner,
            number,
            self._tokens[: self._num_prompt],
            self._sampling,
            blocks,
            self._max_tokens,
        )
        other._tokens, other._computed = list(self._tokens), self._computed
        old, new = (
            pieces_of([(block, 1) for block in held.all], block_bytes, None)
            for held in (self._blocks, blocks)
        )
        _, memory = create_shared("moved", 2 * count * block_bytes)
        staging = pool.staging(memoryview(memory))
        staging.gather(old, 0, block_bytes, pool.moment())
        staging.scatter(0, new, pool.moment())
        staging.scatter(count * block_bytes, old, pool.moment())
        staging.close()
        pool.computed()
        self._runner.forget([self._number])
        return other

    def end(self) -> None:
        """Frees what the runner keeps of the sequence."""
        self._runner.forget([self._number])


def require_moves(runner: ModelRunner, pool: DeviceKvPool | DividedPool, max_tokens: int) -> None:
    """Compares a sequence that moves with one that stays. No block may be in use.

    Args:
        max_tokens: maximum number of positions of one step.

    Raises:
        ConfigError: they have other tokens, or the pool is too small.
        LostError: the device failed.
    """
    spec = runner.spec
    draw = random.Random(1)
    prompt = [draw.randrange(spec.vocab_size) for _ in range(spec.layout.block_size + 1)]
    count = num_blocks_of(len(prompt) + NEW_TOKENS, spec.layout.block_size)
    num_groups, num_state = len(spec.groups.windows), spec.groups.state_blocks
    needed = 2 * (count * num_groups + num_state)
    if pool.num_blocks < needed:
        raise ConfigError(f"a pool of {pool.num_blocks} blocks is too small: take {needed}")

    def held(first: int) -> HeldBlocks:
        # Every second block, so that none follows the one before it.
        free = iter(range(first, needed, 2))
        tables = [list(islice(free, count)) for _ in range(num_groups)]
        return HeldBlocks(tables, list(free))

    stays = CheckedSequence(runner, -1, prompt, _SAMPLING, held(0), max_tokens)
    expected = stays.tokens(NEW_TOKENS)
    stays.end()
    before = CheckedSequence(runner, -2, prompt, _SAMPLING, held(0), max_tokens)
    before.tokens(MOVED_AFTER)
    after = before.moved(-3, held(1), pool)
    found = after.tokens(NEW_TOKENS)
    after.end()
    if found != expected:
        raise ConfigError(
            f"with this model on this device, {NEW_TOKENS} tokens of a sequence that moved after "
            f"{MOVED_AFTER} are {found}, and {expected} of one that did not: its KV is not in the "
            "blocks that workers exchange, or its kernels do not repeat their results; take the "
            "engine kvmesh, or `vllm serve`"
        )
