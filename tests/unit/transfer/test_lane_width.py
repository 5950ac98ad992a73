"""How many connections are taken, against links whose rate depends on it."""

from collections.abc import Callable

import pytest

from kvmesh.transfer.lane_width import MOST_LANES, LaneWidth, lanes_by_cores


def widths(width: LaneWidth, rate: Callable[[int], float], transfers: int) -> list[int]:
    """What transfers take, one after the other."""
    taken = []
    for _ in range(transfers):
        taken.append(width.next())
        width.saw(taken[-1], rate(taken[-1]))
    return taken


def test_a_number_that_is_set_is_kept() -> None:
    width = LaneWidth.of(3, cores=1)
    assert set(widths(width, lambda lanes: lanes * 1e9, 100)) == {3}
    assert width.most == 3


@pytest.mark.parametrize(("cores", "lanes"), [(1, 1), (2, 1), (4, 2), (8, 4), (128, 4)])
def test_cores_say_where_to_begin(cores: int, lanes: int) -> None:
    assert lanes_by_cores(cores) == lanes == LaneWidth.of(0, cores).now


def test_a_link_that_one_connection_does_not_fill_gets_all_of_them() -> None:
    width = LaneWidth.of(0, cores=2)
    widths(width, lambda lanes: lanes * 1e8, 400)
    assert width.now == MOST_LANES


def test_connections_that_are_in_each_others_way_are_given_up() -> None:
    width = LaneWidth.of(0, cores=16)
    taken = widths(width, lambda lanes: 8e9 / lanes, 400)
    assert (taken[0], width.now) == (4, 1)


def test_what_gains_little_is_not_taken_and_seldom_tried() -> None:
    width = LaneWidth.of(0, cores=4)
    taken = widths(width, lambda lanes: 1e9 + lanes * 1e7, 260)
    assert width.now == 2
    assert {1, 2, 3} == set(taken)
    assert taken.count(2) == 240


def test_one_connection_alone_tries_a_second() -> None:
    width = LaneWidth(1, 2)
    taken = widths(width, lambda lanes: 1e9, 60)
    assert set(taken) == {1, 2}
    assert width.now == 1
