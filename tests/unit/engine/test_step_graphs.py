"""What is captured, in which order, and what happens when time or memory end."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.engine.step_graphs import CaptureBounds, StepGraphs


class Recording:
    """A graph that runs the step again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Device:
    """A device on which a capture costs a second and a megabyte."""

    def __init__(self, clock: ManualClock, refuses: int = 0) -> None:
        self._clock = clock
        self._refuses = refuses
        self.captured: list[int] = []
        self.rows = 0

    def compute(self, bucket: int) -> None:
        self.rows = bucket

    def capture(self, run: Callable[[], None]) -> Recording:
        run()
        if self.rows == self._refuses:
            raise RuntimeError("out of memory\nand much more")
        self._clock.advance(1.0)
        self.captured.append(self.rows)
        return Recording(run)

    def free_bytes(self) -> int:
        return (100 - len(self.captured)) << 20


def capture(device: Device, clock: ManualClock, bounds: CaptureBounds) -> StepGraphs:
    graphs = StepGraphs()
    graphs.capture(device.compute, (1, 2, 4, 8), device, clock, bounds)
    return graphs


def test_the_largest_is_captured_first_and_each_is_replayed() -> None:
    clock = ManualClock()
    device = Device(clock)
    graphs = capture(device, clock, CaptureBounds())
    assert device.captured == [8, 4, 2, 1]
    assert graphs.buckets == (1, 2, 4, 8)
    for bucket in graphs.buckets:
        graphs.replay(bucket)
        assert device.rows == bucket


@pytest.mark.parametrize(
    ("bounds", "buckets"),
    [
        (CaptureBounds(seconds=1.5), (4, 8)),
        (CaptureBounds(used_bytes=2 << 20), (2, 4, 8)),
        (CaptureBounds(seconds=0.0, used_bytes=0), (8,)),
    ],
)
def test_bounds_leave_the_small_ones_out(bounds: CaptureBounds, buckets: tuple[int, ...]) -> None:
    clock = ManualClock()
    assert capture(Device(clock), clock, bounds).buckets == buckets


def test_what_cannot_be_captured_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    with caplog.at_level(logging.INFO, logger="kvmesh.engine.step_graphs"):
        graphs = capture(Device(clock, refuses=2), clock, CaptureBounds())
    assert graphs.buckets == (4, 8)
    events = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert events == [
        ("INFO", "graph_captured"),
        ("INFO", "graph_captured"),
        ("WARNING", "graphs_ready"),
    ]
    fields = caplog.records[-1].__dict__["fields"]
    assert fields["left_out"] == "2 rows: out of memory"
