"""Messages that are ready together travel as one and are taken apart in their order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.rpc.outbox import MAX_JOINED_BYTES, Outbox, joined, joined_outbox, parts
from kvmesh.v1.kv_manager_service_pb2 import MatchPrefixRequest


def _messages(sizes: list[int]) -> list[MatchPrefixRequest]:
    return [
        MatchPrefixRequest(correlation_id=number, block_hashes=bytes(size))
        for number, size in enumerate(sizes, 1)
    ]


@given(st.lists(st.sampled_from([0, 1, MAX_JOINED_BYTES // 3, MAX_JOINED_BYTES + 1]), max_size=9))
def test_all_arrive_once_and_in_order(sizes: list[int]) -> None:
    sent = list(joined(_messages(sizes))) if sizes else []
    received = [part for message in sent for part in parts(message)]
    assert [part.correlation_id for part in received] == list(range(1, len(sizes) + 1))
    assert [len(part.block_hashes) for part in received] == sizes
    for message in sent:
        assert message.ByteSize() <= MAX_JOINED_BYTES + 64 or not message.more


@pytest.mark.parametrize("count", [1, 2, 50])
def test_small_ones_are_one(count: int) -> None:
    assert len(list(joined(_messages([16] * count)))) == 1


async def test_an_outbox_joins_what_came_since_the_last_message() -> None:
    outbox: Outbox[MatchPrefixRequest] = Outbox()
    sent = joined_outbox(outbox)
    first, second, third = _messages([1, 2, 3])
    outbox.put(first)
    assert not (await anext(sent)).more
    outbox.put(second)
    outbox.put(third)
    outbox.close()
    assert [part.correlation_id async for message in sent for part in parts(message)] == [2, 3]


async def test_the_first_message_of_a_round_does_not_wait_for_others() -> None:
    taken: list[list[int]] = []
    outbox: Outbox[int] = Outbox()
    outbox.divert(taken.append, at_once=True)
    outbox.put(1)
    assert taken == [[1]]
    outbox.put(2)
    outbox.put(3)
    assert taken == [[1]]
    await asyncio.sleep(0)
    assert taken == [[1], [2, 3]]
    outbox.hold(True)
    outbox.put(4)
    assert len(taken) == 2
    outbox.hold(False)
    assert taken[2:] == [[4]]


async def test_after_a_round_of_many_the_first_message_waits_for_others() -> None:
    taken: list[list[int]] = []
    outbox: Outbox[int] = Outbox()
    outbox.divert(taken.append, at_once=True)
    for crowd in ([1, 2], [3, 4, 5], [6]):
        for number in crowd:
            outbox.put(number)
        await asyncio.sleep(0)
    assert taken == [[1], [2], [3, 4, 5], [6]]
    outbox.put(7)  # the one before was alone
    assert taken[4:] == [[7]]
