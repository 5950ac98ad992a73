from __future__ import annotations

import asyncio

import pytest

from kvmesh.policy.heat import HeatTable
from services.kvmanager import heat, metrics
from services.kvmanager.heat import HeatBoard
from tests.unit.policy.test_heat import SIZE, name, prefix


@pytest.fixture
def board() -> HeatBoard:
    return HeatBoard(lambda: HeatTable(SIZE, 100))


async def test_the_segments_of_each_namespace_are_counted_apart(board: HeatBoard) -> None:
    board.note("m", prefix("a"), SIZE)
    board.note("n", prefix("b") + prefix("c"), SIZE)
    await board.count()
    found = {space: [each.name for each in heats] for space, heats in board.hottest(9).items()}
    assert found == {"m": [name("a")], "n": [name("b")]}
    assert {space: len(cold) for space, cold in board.cooled(0.5, 2.0, 9).items()} == {
        "m": 1,
        "n": 1,
    }
    assert {space: len(cold) for space, cold in board.cooled(2.0, 9.0, 9).items()} == {
        "m": 0,
        "n": 0,
    }


async def test_a_very_long_prefix_is_counted_at_its_start(
    board: HeatBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat, "MAX_NOTED_BLOCKS", 2 * SIZE)
    board.note("m", prefix("abc"), 3 * SIZE)
    await board.count()
    assert {each.name for each in board.hottest(9)["m"]} == {name("a"), name("ab")}


async def test_lookups_get_their_turn_between_notes(board: HeatBoard) -> None:
    for _ in range(3 * heat.NOTES_AT_ONCE):
        board.note("m", prefix("a"), SIZE)
    left = list[int]()

    async def watch() -> None:
        while board._notes:
            left.append(len(board._notes))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await board.count()
    await watching
    assert left == [2 * heat.NOTES_AT_ONCE, heat.NOTES_AT_ONCE]
    before = metrics.HEAT_NOTES_DROPPED._value.get()
    board.note("m", prefix("a"), SIZE)
    await board.count()
    assert metrics.HEAT_NOTES_DROPPED._value.get() == before


async def test_lookups_that_come_too_fast_are_not_all_counted(board: HeatBoard) -> None:
    before = metrics.HEAT_NOTES_DROPPED._value.get()
    for _ in range(heat.MAX_NOTES + 5):
        board.note("m", prefix("a"), SIZE)
    await board.count()
    await board.count()
    assert metrics.HEAT_NOTES_DROPPED._value.get() == before + 5, "each of them once"
    (segment,) = board.hottest(10)["m"]
    assert (segment.name, segment.reads) == (name("a"), heat.MAX_NOTES)
    for _ in range(20):
        board.fade(0.5)
    assert board.hottest(10) == {}
