"""Pieces of a transfer that are carried side by side."""

import asyncio
import contextlib

import pytest

from kvmesh.transfer.channel import carry_all


async def test_however_often_it_is_cancelled_its_pieces_have_ended_before_it() -> None:
    left = asyncio.Event()
    in_memory: set[int] = set()

    async def carry(piece: int) -> None:
        in_memory.add(piece)
        while not left.is_set():  # as who waits for a thread
            with contextlib.suppress(asyncio.CancelledError):
                await left.wait()
        in_memory.remove(piece)

    task = asyncio.create_task(carry_all(range(5), carry, 2))
    while len(in_memory) < 2:
        await asyncio.sleep(0)
    for _ in range(9):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    left.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not in_memory
