"""Where a prefix can be resumed is told exactly, whatever comes and goes."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.block_names import TELLS_STATES, saved_state
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_news import BlockNews
from kvmesh.kv.groups import first_visible, group_key, state_key

SIZE = 4
LENGTH = 7


def name(path: tuple[int, ...]) -> BlockHash:
    """Of the last block of a path in a tree of prompts."""
    return BlockHash(blake2b(bytes(path), digest_size=16).digest())


PATHS = [(branch,) * length for branch in (0, 1) for length in range(1, LENGTH + 1)]
PATHS += [(0, 0, 0, *((2,) * length)) for length in range(1, 4)]


@st.composite
def groups(draw: st.DrawFn) -> KvGroups:
    windows = draw(st.lists(st.integers(0, 4 * SIZE), max_size=2))
    return KvGroups((0, *windows), state_blocks=draw(st.integers(0, 2)))


def keys_of(path: tuple[int, ...], of: KvGroups) -> list[BlockHash]:
    """The names of all that a worker may have of one block."""
    tables = [group_key(name(path), group) for group in range(len(of.windows))]
    return tables + [state_key(name(path), part) for part in range(of.state_blocks)]


def can_end(path: tuple[int, ...], of: KvGroups, here: set[BlockHash]) -> bool:
    """As `resume_length` has it, but for full groups."""
    seen = [(group, window) for group, window in enumerate(of.windows) if window > 1]
    for group, window in seen:
        first = first_visible(window, len(path) * SIZE, SIZE)
        for length in range(first + 1, len(path) + 1):
            if group_key(name(path[:length]), group) not in here:
                return False
    states = [state_key(name(path), part) in here for part in range(of.state_blocks)]
    return bool(seen or states) and all(states)


@settings(max_examples=200, deadline=None)
@given(groups(), st.lists(st.tuples(st.sampled_from(PATHS), st.integers(0, 9)), max_size=120))
def test_points_are_told_exactly(of: KvGroups, moves: list[tuple[tuple[int, ...], int]]) -> None:
    news = BlockNews(of, SIZE)
    here: set[BlockHash] = set()
    told: set[BlockHash] = set()
    for path, choice in moves:
        keys = keys_of(path, of)
        key = keys[choice % len(keys)]
        if key in here:
            here.discard(key)
            news.removed(key)
        else:
            here.add(key)
            news.follows(name(path), name(path[:-1]) if len(path) > 1 else None)
            news.stored(key)
        events = news.take()
        told = (told | set(events.stored)) - set(events.removed)
        held = {name(each) for each in PATHS if name(each) in here}
        ends = {saved_state(name(each)) for each in PATHS if can_end(each, of, here)}
        always = {TELLS_STATES} if of.state_blocks or max(of.windows) > 1 else set()
        assert told == held | ends | always == set(news.names(held))
        news.check_integrity(held, {})
