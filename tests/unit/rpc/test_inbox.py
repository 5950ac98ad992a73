"""Messages are handled in their order, and a peer that sends too many is not read."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.core.errors import ProtocolError
from kvmesh.rpc.inbox import MAX_WAITING, Inbox


async def test_messages_come_in_order_until_the_end() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    reading = asyncio.ensure_future(anext(messages := aiter(inbox)))
    assert await reading == 1
    reading = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    inbox.put(2)
    inbox.put(3)
    inbox.close()
    assert await reading == 2
    assert [message async for message in messages] == [3]


async def test_its_error_follows_the_messages_before_it() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.close(ProtocolError("damaged_message", "no message"))
    messages = aiter(inbox)
    assert await anext(messages) == 1
    with pytest.raises(ProtocolError, match="no message"):
        await anext(messages)


async def test_a_peer_is_held_until_its_messages_were_handled() -> None:
    inbox, holds = Inbox[int](), list[bool]()
    inbox.on_hold = holds.append
    for number in range(MAX_WAITING + 3):
        inbox.put(number)
    assert holds == [True]
    room = asyncio.create_task(inbox.room())
    messages = aiter(inbox)
    for number in range(MAX_WAITING + 3):
        assert (holds, room.done()) == ([True], False)
        assert await anext(messages) == number
    assert holds == [True, False]
    await room
