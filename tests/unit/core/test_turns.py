from __future__ import annotations

import asyncio

from kvmesh.core.turns import Parts, at_once, in_turns


def counted(parts: list[int], count: int) -> Parts[str]:
    for number in range(count):
        parts.append(number)
        yield
    return f"{count} parts"


async def test_what_is_due_runs_between_two_parts() -> None:
    parts: list[int] = []
    seen: list[int] = []

    async def look() -> None:
        while len(parts) < 3:
            seen.append(len(parts))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    assert await in_turns(counted(parts, 3)) == "3 parts"
    await looking
    assert seen == [1, 2]


def test_at_once_nobody_comes_between() -> None:
    parts: list[int] = []
    assert at_once(counted(parts, 3)) == "3 parts"
    assert parts == [0, 1, 2]
