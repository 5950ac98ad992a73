from __future__ import annotations

from kvmesh.sim.events import EventQueue


def test_events_happen_in_order_of_time_then_of_scheduling() -> None:
    events, seen = EventQueue(), []
    events.at(2.0, lambda: seen.append(("b", events.now())))
    events.at(1.0, lambda: seen.append(("a", events.now())))
    events.at(2.0, lambda: seen.append(("c", events.now())))
    events.run(lambda: False)
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    assert events.num_events == 3


def test_a_cancelled_event_does_not_happen() -> None:
    events, seen = EventQueue(), []
    timer = events.after(1.0, lambda: seen.append(1))
    timer.cancel()
    events.run(lambda: False)
    timer.cancel()
    assert seen == []


def test_the_clock_never_goes_back() -> None:
    events, seen = EventQueue(), []
    events.at(5.0, lambda: events.at(1.0, lambda: seen.append(events.now())))
    events.run(lambda: False)
    assert seen == [5.0]


def test_it_ends_when_told() -> None:
    events, seen = EventQueue(), []
    for time in (1.0, 2.0, 3.0):
        events.at(time, lambda: seen.append(events.now()))
    events.run(lambda: len(seen) == 2)
    assert seen == [1.0, 2.0]
