"""The device benchmark on the twin of a device, small; its targets from rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks import device
from kvmesh.transfer.device import SharedMemory
from tests.device_twin import TwinDriver, TwinPool
from tests.transfer_pair import LAYOUT


def test_every_way_is_measured_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = TwinPool(LAYOUT, 8)

    @contextmanager
    def holder() -> Iterator[SharedMemory]:
        yield owner.share()

    monkeypatch.setattr(device, "_holder", holder)
    driver = TwinDriver()
    rows = device.measure(driver, LAYOUT, (1, 4), 2)
    rows += device.measure_peer(driver, LAYOUT, (1, 4), 2)

    assert len(rows) == 2 * (2 + 4) + 2 * (1 + 2)
    assert all(row["GB/s"]["min"] > 0 for row in rows)
    assert [target.value is None for target in device.targets(rows)] == [False] * 3
    assert (driver.pinned_bytes, driver.num_open) == (0, 0)


def test_targets_are_shares_of_the_plain_copies_at_the_largest_size() -> None:
    def row(what: str, blocks: str, size: float, rate: float) -> dict[str, Any]:
        return {"what": what, "blocks": blocks, "MiB": size, "GB/s": {"median": rate}}

    rows = [
        row("plain copy out", "contiguous", 4.0, 1.0),
        row("gather to the host", "scattered", 4.0, 9.0),
        row("plain copy out", "contiguous", 8.0, 20.0),
        row("gather to the host", "scattered", 8.0, 19.0),
        row("plain copy in", "contiguous", 8.0, 20.0),
        row("scatter from the host", "scattered", 8.0, 10.0),
    ]
    found = device.targets(rows)
    assert [target.value for target in found] == [0.95, 0.5, None]
    assert [target.met for target in found] == [True, False, None]
