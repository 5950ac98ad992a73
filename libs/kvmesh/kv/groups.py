"""KV groups: the KV that each layer keeps, and how far a cached prefix can be resumed. Pure.

All groups take blocks from one pool, and a block has the same bytes in each:

    full      every position: one block per `block_size` positions (latent KV is of this kind)
    window    the latest positions: blocks before the window are given back
    state     the recurrent state of linear layers: a fixed number of blocks

    A prefix can be resumed where every group can: full groups hold all blocks before the position,
    window groups hold the blocks that the next query sees, and a state is saved exactly there.
Source: PrfaaS §3.2. Tests: tests/unit/kv/test_sequence_blocks.py, tests/property/test_groups.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash

HOLE = -1
"""Entry of a block table: no block is held for these positions."""

UNBOUNDED_BLOCKS = 1 << 31
"""Number of blocks that exceeds any sequence's."""

# Tokens between saved states where no group keeps all positions, so that the cost rule of
# `state_interval` has nothing to compare states with.
_INTERVAL_WITHOUT_FULL_TOKENS = 512


def num_blocks_of(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)


def first_visible(window: int, position: int, block_size: int) -> int:
    """Returns the index of the first block that the query at a position sees."""
    return max(0, position - window + 1) // block_size if window else 0


def group_key(block_hash: BlockHash, group: int) -> BlockHash:
    """Returns the pool's name of a token group's block; the first group uses the hash itself."""
    return block_hash if group == 0 else BlockHash(block_hash + b"g" + bytes((group,)))


def state_key(block_hash: BlockHash, part: int) -> BlockHash:
    """Returns the pool's name of one block of the state after the block with this hash."""
    return BlockHash(block_hash + b"s" + part.to_bytes(2, "little"))


def resume_length(
    groups: KvGroups,
    limit: int,
    block_size: int,
    is_cached: Callable[[int, int], bool],
    has_state: Callable[[int], bool],
) -> int:
    """Returns the length of the longest prefix, in blocks, from which every group can resume.

    Args:
        limit: maximum length in blocks.
        is_cached: takes a token group and a block index.
        has_state: takes a length in blocks; returns whether the state after it is saved.
    """
    longest = limit
    for group, window in enumerate(groups.windows):
        if window == 0:
            longest = next((i for i in range(longest) if not is_cached(group, i)), longest)
    # Per window group, the first block of the unbroken run that ends before each length.
    runs: list[tuple[int, list[int]]] = []
    for group, window in enumerate(groups.windows):
        if window:
            since = [0]
            for index in range(longest):
                since.append(since[-1] if is_cached(group, index) else index + 1)
            runs.append((window, since))
    for length in range(longest, 0, -1):
        position = length * block_size
        visible = all(
            since[length] <= first_visible(window, position, block_size) for window, since in runs
        )
        if visible and (groups.state_blocks == 0 or has_state(length)):
            return length
    return 0


def blocks_at_most(groups: KvGroups, num_tokens: int, chunk_tokens: int, block_size: int) -> int:
    """Returns the most blocks that one sequence holds at once while it is computed in chunks.

    The blocks reserved for the window at its end may coexist with the window before the chunk.
    A state to resume from may coexist with its copy.
    """
    whole = num_blocks_of(num_tokens, block_size)
    chunk = num_blocks_of(chunk_tokens, block_size) + 1
    total = 2 * groups.state_blocks
    for window in groups.windows:
        moving = 2 * (num_blocks_of(window, block_size) + 1) + chunk
        total += min(whole, moving) if window else whole
    return total


def longest_sequence(groups: KvGroups, num_blocks: int, chunk_tokens: int, block_size: int) -> int:
    """Returns the tokens of the longest sequence that fits a pool alone, in whole blocks.

    Without a full group that is `UNBOUNDED_BLOCKS` blocks once the window fits.
    """
    low, high = 0, num_blocks if 0 in groups.windows else UNBOUNDED_BLOCKS
    while low < high:
        middle = (low + high + 1) // 2
        needed = blocks_at_most(groups, middle * block_size, chunk_tokens, block_size)
        low, high = (middle, high) if needed <= num_blocks else (low, middle - 1)
    return low * block_size


def state_interval(groups: KvGroups, block_size: int, asked_tokens: int = 0) -> int:
    """Returns the number of positions between saved states, a multiple of the block size.

    Args:
        asked_tokens: the configured interval. 0 selects the cost rule: saved states take at most
            as many blocks as the positions between them. Then the cache is at worst half as deep
            as without states, and a resumed prefix loses half an interval on average.
    """
    if asked_tokens:
        return num_blocks_of(asked_tokens, block_size) * block_size
    num_full = groups.windows.count(0)
    if num_full == 0:
        return num_blocks_of(_INTERVAL_WITHOUT_FULL_TOKENS, block_size) * block_size
    return max(1, num_blocks_of(groups.state_blocks, num_full)) * block_size


def save_positions(
    start: int, end: int, num_prompt_tokens: int, interval: int, block_size: int
) -> list[int]:
    """Returns where a chunk saves states: at every interval, and before the prompt's end.

    The last token of a prompt is always computed again, so the last useful position is the block
    boundary before it.

    Returns:
        Positions p with `start < p <= end`, ascending.
    """
    last = (num_prompt_tokens - 1) // block_size * block_size
    first = (start // interval + 1) * interval
    positions = set(range(first, min(end, last) + 1, interval))
    if start < last <= end:
        positions.add(last)
    return sorted(positions)


@dataclass(frozen=True, slots=True)
class ArrivingBlock:
    """A block that a handoff moves.

    Attributes:
        tokens: leading tokens of the prompt that must be computed before it is complete.
        kind: its token group; -1, -2 and so on are the first, second and further block of a state.
    """

    block: int
    tokens: int
    kind: int = 0


def arriving_blocks(
    groups: KvGroups,
    tables: Sequence[Sequence[int]],
    state: Sequence[int],
    span: range,
    num_tokens: int,
    block_size: int,
) -> list[ArrivingBlock]:
    """Returns the blocks of a prompt's KV, in the order in which both ends count them.

    Args:
        span: block indices to move; the receiver has the indices before them already.

    Returns:
        The blocks that the query after the prompt sees, by index, then group; then the state.
        Ids are those of `tables`, or `HOLE` for blocks that are not computed yet.
    """
    visible = [first_visible(window, num_tokens, block_size) for window in groups.windows]
    found = [
        ArrivingBlock(_at(table, index), min((index + 1) * block_size, num_tokens), group)
        for index in span
        for group, (table, first) in enumerate(zip(tables, visible, strict=True))
        if index >= first
    ]
    return found + [ArrivingBlock(block, num_tokens, -1 - part) for part, block in enumerate(state)]


def arriving_keys(
    groups: KvGroups, hashes: Sequence[BlockHash], span: range, block_size: int
) -> list[BlockHash]:
    """Returns the names of the `arriving_blocks` of a prefix that ends with `span`, in order.

    Args:
        hashes: hashes of the prefix, from its first block on.
    """
    num_tokens = span.stop * block_size
    visible = [first_visible(window, num_tokens, block_size) for window in groups.windows]
    found = [
        group_key(hashes[index], group)
        for index in span
        for group, first in enumerate(visible)
        if index >= first
    ]
    last = hashes[span.stop - 1]
    return found + [state_key(last, part) for part in range(groups.state_blocks)]


def _at(table: Sequence[int], index: int) -> int:
    return table[index] if index < len(table) else HOLE
