from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from services.gateway.merge import merge


class Streams:
    """Streams that note when they are closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def of(self, name: str, count: int) -> AsyncGenerator[str, None]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield f"{name}{number}"
        finally:
            self.closed.append(name)

    async def failing(self, name: str) -> AsyncGenerator[str, None]:
        try:
            yield f"{name}0"
            raise LookupError(name)
        finally:
            self.closed.append(name)


@pytest.mark.parametrize("counts", [[3], [2, 0, 3], []])
async def test_all_items_in_order_of_each_stream(counts: list[int]) -> None:
    made = Streams()
    streams = [made.of(name, count) for name, count in zip("abc", counts, strict=False)]
    items = [item async for item in merge(streams)]
    for name, count in zip("abc", counts, strict=False):
        assert [item for item in items if item[0] == name] == [f"{name}{n}" for n in range(count)]
    assert sorted(made.closed) == list("abc"[: len(counts)])


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
async def test_closing_closes_all(names: str) -> None:
    made = Streams()
    async with aclosing(merge([made.of(name, 10_000) for name in names])) as items:
        await anext(items)
    assert sorted(made.closed) == list(names)


async def test_first_error_ends_all() -> None:
    made = Streams()
    with pytest.raises(LookupError):
        _ = [item async for item in merge([made.of("a", 10_000), made.failing("b")])]
    assert sorted(made.closed) == ["a", "b"]
