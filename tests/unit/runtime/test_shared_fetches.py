"""SharedFetches: which fetch a block is expected from, and what those who wait are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.types import BlockHash, Endpoint, PrefixSource, WorkerId
from kvmesh.runtime.shared_fetches import SharedFetches

SOURCE = PrefixSource(WorkerId("holder"), 7, Endpoint("h", 1), 4)
A, B, C = (BlockHash(bytes([number]) * 16) for number in range(3))


def test_a_block_is_expected_while_its_fetch_is_under_way() -> None:
    shared = SharedFetches()
    with shared.flight(SOURCE, [A, B]) as flight:
        assert shared.bringing(A) is shared.bringing(B) is flight
        assert shared.bringing(C) is None
        assert not shared.is_idle
        assert not flight.over.is_set()
    assert flight.over.is_set()
    assert shared.bringing(A) is None
    assert shared.is_idle


def test_who_waits_is_woken_when_the_fetch_fails() -> None:
    shared = SharedFetches()
    with pytest.raises(TimeoutError), shared.flight(SOURCE, [A]) as flight:
        raise TimeoutError
    assert flight.over.is_set()
    assert not flight.answers_for(SOURCE, A), "another one may have more time"


def test_blocks_that_two_fetches_bring_are_those_of_the_first() -> None:
    shared = SharedFetches()
    with shared.flight(SOURCE, [B, C]) as first, shared.flight(SOURCE, [A, B, C]) as second:
        assert shared.bringing(A) is second
        assert shared.bringing(B) is shared.bringing(C) is first
    assert shared.is_idle


def test_the_word_of_a_holder_is_that_of_one_life_of_it() -> None:
    shared = SharedFetches()
    with shared.flight(SOURCE, [A]) as flight:
        flight.settled = True
    assert flight.answers_for(SOURCE, A)
    assert not flight.answers_for(SOURCE, B), "it was not asked for"
    assert flight.answers_for(replace(SOURCE, num_blocks=9), A)
    assert not flight.answers_for(replace(SOURCE, incarnation=8), A)
    assert not flight.answers_for(replace(SOURCE, worker_id=WorkerId("other")), A)
