"""What is read of NVML, through the real `pynvml` on a stand-in for the driver; no device."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from kvmesh.core.health import NO_DEVICE_ERRORS, DeviceErrors
from kvmesh.core.types import WorkerLoad
from kvmesh.engine.device_names import pci_bus_id
from kvmesh.runtime.device_watch import (
    APPLICATION_XIDS,
    DeviceWatch,
    joined,
    with_device_errors,
)
from tests.waiting import until

GPU_IS_LOST, RESET_REQUIRED, UNKNOWN = 15, 16, 999
DOUBLE_BIT, OFF_THE_BUS = 48, 79

Tell = Callable[..., None]


def build_driver(folder: Path, name: str) -> Path:
    """Compiles the stand-in under a name."""
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built = folder / name
    source = Path(__file__).with_name("fake_nvml.c")
    soname = f"-Wl,-soname,{name}"
    command = [compiler, "-x", "c", "-shared", "-fPIC", soname, "-o", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return built


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, loaded under the name by which `pynvml` asks for the driver."""
    built = build_driver(tmp_path_factory.mktemp("driver"), "libnvidia-ml.so.1")
    ctypes.CDLL(str(built))
    return built


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Says how the device is."""
    file = tmp_path / "device"
    monkeypatch.setenv("FAKE_NVML", str(file))

    def write(
        memory: int = 0, failing: int = 0, error: int = 0, xids: int = 0, xid: int = 0
    ) -> None:
        new = file.with_suffix(".new")
        new.write_text(f"{memory} {failing} {error} {xids} {xid}")
        new.replace(file)

    write()
    return write


@pytest.fixture
def watch(library: Path, tell: Tell) -> Iterator[DeviceWatch]:
    made = DeviceWatch(pynvml, pci_bus_id(0, str(library)))
    yield made
    pynvml.nvmlShutdown()
    assert ctypes.CDLL(str(library)).fake_held() == 0


def test_a_device_without_errors(watch: DeviceWatch) -> None:
    watch.look()
    assert watch.errors == NO_DEVICE_ERRORS


def test_memory_errors_count_from_the_start(library: Path, tell: Tell) -> None:
    tell(memory=7)
    watch = DeviceWatch(pynvml, pci_bus_id(0, str(library)))
    watch.look()
    assert watch.errors == NO_DEVICE_ERRORS, "those of an earlier life"
    tell(memory=9)
    watch.look()
    tell(memory=10)
    watch.look()
    assert watch.errors == DeviceErrors(errors_total=3)
    pynvml.nvmlShutdown()


def test_each_critical_xid_counts(watch: DeviceWatch, tell: Tell) -> None:
    tell(xids=2, xid=DOUBLE_BIT)
    watch.look()
    watch.look()
    watch.look()
    assert watch.errors == DeviceErrors(errors_total=2, last_xid=DOUBLE_BIT)


@pytest.mark.parametrize("xid", sorted(APPLICATION_XIDS))
def test_xids_of_programs_do_not(watch: DeviceWatch, tell: Tell, xid: int) -> None:
    tell(xids=1, xid=xid)
    watch.look()
    assert watch.errors == NO_DEVICE_ERRORS


def test_a_device_without_a_row_left_fails(watch: DeviceWatch, tell: Tell) -> None:
    tell(failing=1)
    watch.look()
    assert watch.errors == DeviceErrors(failing=True)


@pytest.mark.parametrize("error", [GPU_IS_LOST, RESET_REQUIRED])
def test_a_device_that_does_not_answer_is_lost_until_it_does(
    watch: DeviceWatch, tell: Tell, error: int
) -> None:
    tell(error=error)
    watch.look()
    assert watch.errors == DeviceErrors(lost=True)
    tell()
    watch.look()
    assert watch.errors == NO_DEVICE_ERRORS


def test_a_device_that_fell_off_the_bus_stays_lost(watch: DeviceWatch, tell: Tell) -> None:
    tell(xids=1, xid=OFF_THE_BUS)
    watch.look()
    watch.look()
    assert watch.errors == DeviceErrors(errors_total=1, last_xid=OFF_THE_BUS, lost=True)


def test_a_device_without_ecc_and_events_is_watched_for_its_loss(
    library: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML_OLD", "1")
    watch = DeviceWatch(pynvml, pci_bus_id(0, str(library)))
    watch.look()
    assert watch.errors == NO_DEVICE_ERRORS
    pynvml.nvmlShutdown()


def test_a_device_that_nvml_does_not_know(library: Path) -> None:
    with pytest.raises(pynvml.NVMLError_NotFound):
        DeviceWatch(pynvml, "0000:99:00.0")
    assert ctypes.CDLL(str(library)).fake_held() == 0


class Context:
    """The part of a service's context that a watch takes."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()


async def test_reports_have_the_errors(
    library: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvmesh.runtime.device_watch.pci_bus_id", lambda index: pci_bus_id(index, str(library))
    )
    context: Any = Context()
    async with context.stack:
        report = with_device_errors(context, "cuda", lambda: WorkerLoad(blocks_free=3))
        assert report() == WorkerLoad(blocks_free=3)
        tell(memory=1)
        await until(lambda: report().device.errors_total, "they are counted")
        assert dataclasses.replace(report(), device=NO_DEVICE_ERRORS) == WorkerLoad(blocks_free=3)
    assert ctypes.CDLL(str(library)).fake_held() == 0


async def test_all_devices_of_a_worker_are_watched(
    library: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def found(index: int) -> str:
        asked.append(index)
        return pci_bus_id(0, str(library))  # the stand-in has one

    monkeypatch.setattr("kvmesh.runtime.device_watch.pci_bus_id", found)
    context: Any = Context()
    async with context.stack:
        report = with_device_errors(context, "cuda:2", WorkerLoad, num_devices=2)
        tell(memory=1)
        await until(lambda: report().device.errors_total == 2, "each counts it")
        assert len(running()) == 2
    assert asked == [2, 3]
    assert ctypes.CDLL(str(library)).fake_held() == 0


def test_errors_of_several_devices_are_those_of_one() -> None:
    fine, ill = DeviceErrors(), DeviceErrors(2, DOUBLE_BIT, failing=True)
    assert joined([fine, ill, DeviceErrors(1, lost=True)]) == DeviceErrors(
        3, DOUBLE_BIT, failing=True, lost=True
    )
    assert joined([fine, fine]) == NO_DEVICE_ERRORS


async def test_a_driver_that_says_nonsense_ends_the_watch_and_not_the_worker(
    library: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvmesh.runtime.device_watch.pci_bus_id", lambda index: pci_bus_id(index, str(library))
    )
    context: Any = Context()
    async with context.stack:
        report = with_device_errors(context, "cuda:0", WorkerLoad)
        tell(error=UNKNOWN)
        await until(lambda: not running(), "the watch has ended")
        assert report() == WorkerLoad()


def running() -> list[str]:
    """Threads that watch a device."""
    return [each.name for each in threading.enumerate() if each.name == "device watch"]


def report() -> WorkerLoad:
    return WorkerLoad()


def test_the_cpu_is_not_watched_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert with_device_errors(SimpleNamespace(), "cpu", report) is report  # type: ignore[arg-type]


def test_without_the_package_or_the_device_reports_stay(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = SimpleNamespace()
    assert with_device_errors(nothing, "cuda", report) is report, "there is no CUDA driver here"
    monkeypatch.setattr(
        "kvmesh.runtime.device_watch.pci_bus_id", lambda index: pci_bus_id(index, str(library))
    )
    assert with_device_errors(nothing, "cuda:1", report) is report
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert with_device_errors(nothing, "cuda", report) is report
