from __future__ import annotations

from kvmesh.core.busy_time import BusyTime


def test_what_is_under_way_at_once_counts_once() -> None:
    busy = BusyTime()
    busy.begin(1.0)
    busy.begin(2.0)
    busy.end(3.0)
    assert busy.seconds(4.0) == 3.0
    busy.end(5.0)
    assert busy.seconds(9.0) == 4.0


def test_what_is_under_way_counts_before_it_is_over() -> None:
    busy = BusyTime()
    busy.begin(1.0)
    busy.end(2.0)
    busy.begin(5.0)
    assert [busy.seconds(now) for now in (5.0, 5.5)] == [1.0, 1.5]
