"""Drivers of memory that no GPU has: the product's, and the tests' twin of a device."""

from __future__ import annotations

import struct

import pytest
import torch

from kvmesh.core.errors import LostError
from kvmesh.engine.device_driver import DeviceDriver
from kvmesh.engine.host_driver import HostDriver
from kvmesh.transfer.device import HANDLE_BYTES
from tests.device_twin import TwinDriver

SIZE = 10_000


@pytest.fixture(params=[HostDriver, TwinDriver])
def driver(request: pytest.FixtureRequest) -> DeviceDriver:
    made: DeviceDriver = request.param()
    return made


def test_memory_is_opened_by_its_handle(driver: DeviceDriver) -> None:
    _, memory = driver.zeros(SIZE), driver.zeros(SIZE)
    assert not memory.any()
    handle, offset = driver.export(memory)
    assert len(handle) == HANDLE_BYTES
    opened = driver.open(handle, offset + SIZE)[offset:]
    memory[SIZE - 1] = 7
    opened[0] = 5
    assert (int(opened[SIZE - 1]), int(memory[0])) == (7, 5)
    driver.close(handle)


def test_a_part_of_memory_is_exported_with_its_offset(driver: DeviceDriver) -> None:
    memory = driver.zeros(SIZE)
    part = memory[300:400]
    handle, offset = driver.export(part)
    opened = driver.open(handle, offset + 100)[offset:]
    part[:] = 9
    assert opened.sum() == 900
    driver.close(handle)


def test_other_memory_is_not_shared(driver: DeviceDriver) -> None:
    with pytest.raises(LostError):
        driver.export(torch.zeros(10, dtype=torch.uint8))


def test_memory_that_is_not_there_or_smaller_is_not_opened(driver: DeviceDriver) -> None:
    handle, offset = driver.export(driver.zeros(SIZE))
    with pytest.raises(LostError, match="smaller than announced"):
        driver.open(handle, offset + SIZE + 100_000)
    nobody = struct.pack("<QI", 1 << 40, 3).ljust(HANDLE_BYTES, b"\0")
    with pytest.raises(LostError, match="no such memory"):
        driver.open(nobody, 1)


def test_copies_come_after_a_moment_that_is_past(driver: DeviceDriver) -> None:
    driver.mark()
    moment, done = driver.moment(), []
    driver.run(lambda: done.append(1), moment)
    assert done == [1]
    assert driver.is_past(moment)


def test_pinned_memory_is_the_same_memory(driver: DeviceDriver) -> None:
    raw = bytearray(100)
    pinned = driver.pin(memoryview(raw))
    pinned[3] = 4
    assert raw[3] == 4
    driver.unpin(pinned)
