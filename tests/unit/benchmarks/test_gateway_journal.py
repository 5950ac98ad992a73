"""The journal's cost is of pairs, and the shipped gateway's alone is held against the goal."""

from __future__ import annotations

import pytest

from benchmarks.gateway_journal import AGAIN, NONE, STREAMS, WITH, cost, targets_of


def test_a_host_that_slows_down_changes_no_pair() -> None:
    without = [1.0, 2.0, 4.0, 8.0]
    assert cost([1.1 * each for each in without], without) == pytest.approx((10.0, 10.0, 10.0))
    low, middle, high = cost([1.0, 1.1, 1.2, 5.0], [1.0, 1.0, 1.0, 1.0])
    assert low < middle < high
    assert middle == pytest.approx(15.0), "one disturbed pair does not count for more"


def test_targets_are_of_the_first_gateway_and_of_all_failures() -> None:
    rows = [
        {"streams": "64", "gateway": name, "cost %": percent, "failed": failed}
        for name, percent, failed in ((WITH, 5.1, 0), (AGAIN, 1.0, 1), (NONE, 0.0, 0))
    ]
    slow, failed = targets_of(rows)
    assert (slow.value, slow.met) == (5.1, False)
    assert (failed.value, failed.met) == (1.0, False)


def test_every_kind_of_stream_has_a_name_of_its_own() -> None:
    assert len({streams.name for streams in STREAMS}) == len(STREAMS)
