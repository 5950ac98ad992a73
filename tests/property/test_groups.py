"""Planning over KV groups against what the words of its documentation say, position by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.kv_groups import KvGroups
from kvmesh.kv.groups import (
    HOLE,
    UNBOUNDED_BLOCKS,
    arriving_blocks,
    blocks_at_most,
    first_visible,
    longest_sequence,
    resume_length,
    save_positions,
    state_interval,
)

GROUPS = st.builds(
    KvGroups,
    st.lists(st.integers(0, 20), min_size=1, max_size=3).map(tuple),
    st.integers(0, 3),
)


@given(GROUPS, st.integers(1, 5), st.integers(0, 12), st.data())
def test_a_prefix_is_resumed_at_the_longest_length_where_every_group_can(
    groups: KvGroups, size: int, limit: int, data: st.DataObject
) -> None:
    booleans = st.lists(st.booleans(), min_size=limit, max_size=limit)
    cached = [data.draw(booleans) for _ in groups.windows]
    states = data.draw(booleans)

    def can_go_on(length: int) -> bool:
        query = length * size
        for window, blocks in zip(groups.windows, cached, strict=True):
            seen = range(max(0, query - window + 1) if window else 0, query)
            if not all(blocks[position // size] for position in seen):
                return False
        return groups.state_blocks == 0 or states[length - 1]

    expected = next((n for n in range(limit, 0, -1) if can_go_on(n)), 0)
    found = resume_length(
        groups, limit, size, lambda group, i: cached[group][i], lambda length: states[length - 1]
    )
    assert found == expected


@given(st.integers(0, 30), st.integers(0, 100), st.integers(1, 8))
def test_the_first_visible_block_holds_the_first_visible_position(
    window: int, position: int, size: int
) -> None:
    oldest = max(0, position - window + 1) if window else 0
    first = first_visible(window, position, size)
    assert first * size <= oldest < (first + 1) * size


@given(GROUPS, st.integers(1, 60), st.integers(1, 6), st.integers(0, 60))
def test_a_handoff_moves_what_the_next_query_sees_and_the_state(
    groups: KvGroups, num_tokens: int, size: int, cached_tokens: int
) -> None:
    count = -(-num_tokens // size)
    first = min(cached_tokens, num_tokens - 1) // size
    tables = [
        [group * 1000 + index for index in range(count)] for group in range(len(groups.windows))
    ]
    state = [9000 + part for part in range(groups.state_blocks)]
    moved = arriving_blocks(groups, tables, state, range(first, count), num_tokens, size)
    seen = {
        group * 1000 + position // size
        for group, window in enumerate(groups.windows)
        for position in range(max(0, num_tokens - window + 1) if window else 0, num_tokens)
        if position // size >= first
    }
    sent = {each.block for each in moved}
    assert seen | set(state) <= sent
    assert len(sent) == len(moved)
    # At most the block that the window begins in is sent without need.
    assert len(sent) <= len(seen) + len(state) + len(groups.windows)
    # What is complete is always a prefix of the order, so that it can be sent in parts.
    assert [each.tokens for each in moved] == sorted(each.tokens for each in moved)
    # Both ends list the same places, whatever they hold in them yet.
    unknown = arriving_blocks(
        groups, [[] for _ in tables], state, range(first, count), num_tokens, size
    )
    assert [each.tokens for each in unknown] == [each.tokens for each in moved]
    assert all(each.block == HOLE for each in unknown[: len(moved) - len(state)])


@given(GROUPS, st.integers(0, 200), st.integers(1, 64), st.integers(1, 6))
def test_the_longest_sequence_is_the_longest_that_fits(
    groups: KvGroups, num_blocks: int, chunk: int, size: int
) -> None:
    longest = longest_sequence(groups, num_blocks, chunk, size)
    assert longest == 0 or blocks_at_most(groups, longest, chunk, size) <= num_blocks
    bound = num_blocks if 0 in groups.windows else UNBOUNDED_BLOCKS
    too_long = blocks_at_most(groups, longest + size, chunk, size) > num_blocks
    assert too_long or longest == bound * size


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_states_are_saved_at_the_same_positions_however_a_prompt_is_cut(
    cuts: list[int], num_prompt: int, blocks: int, size: int
) -> None:
    interval = blocks * size
    whole = save_positions(0, num_prompt, num_prompt, interval, size)
    found: list[int] = []
    start = 0
    for length in [*cuts, num_prompt]:
        end = min(start + length, num_prompt)
        found += save_positions(start, end, num_prompt, interval, size)
        start = end
    assert found == whole
    assert all(position % size == 0 for position in whole)
    assert max(whole, default=0) == (num_prompt - 1) // size * size


@given(st.integers(0, 3), st.integers(1, 40), st.integers(1, 32))
def test_saved_states_take_at_most_the_room_of_the_positions_between_them(
    num_full: int, state_blocks: int, size: int
) -> None:
    groups = KvGroups((0,) * num_full or (8,), state_blocks)
    interval = state_interval(groups, size)
    assert interval % size == 0
    if num_full:
        assert state_blocks <= interval // size * num_full
        assert interval == size or state_blocks > (interval // size - 1) * num_full
    assert state_interval(groups, size, asked_tokens=100) == -(-100 // size) * size
