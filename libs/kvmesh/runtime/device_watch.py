"""Watches a worker's NVIDIA device through NVML, beside the computation, and counts its errors.

NVML comes from `nvidia-ml-py`, an optional package that is imported only for a CUDA device. Memory
errors that ECC cannot correct, critical XIDs and a lost device are counted as `DeviceErrors`. Not
tried on a device so far; stand-ins for the two driver libraries check the calls.
Tests: tests/unit/runtime/test_device_watch.py, tests/chaos/test_device_errors.py.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from kvmesh.core.health import NO_DEVICE_ERRORS, DeviceErrors
from kvmesh.core.types import WorkerLoad
from kvmesh.engine.device_names import device_index, pci_bus_id
from kvmesh.runtime.app import ServiceContext
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the counters, and the longest wait for an event."""

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs after which the device is fine: a program on it made a mistake. NVIDIA's device plugin for
Kubernetes ignores the same ones."""

LOST_XIDS = frozenset({79})
"""XIDs after which the device does not answer: 79, it has fallen off the bus."""


def with_device_errors(
    context: ServiceContext, device: str, report: Callable[[], WorkerLoad], num_devices: int = 1
) -> Callable[[], WorkerLoad]:
    """Adds the devices' errors to a worker's reports; `report` itself where NVML tells nothing.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        num_devices: devices of the worker on this host, this one and those after it.
    """
    first = device_index(device)
    if first is None:
        return report
    found = (_watch_of(index) for index in range(first, first + num_devices))
    watches = [watch for watch in found if watch is not None]
    if not watches:
        return report
    for watch in watches:
        watch.start()
        context.stack.callback(watch.close)
    return lambda: dataclasses.replace(report(), device=joined(each.errors for each in watches))


def joined(devices: Iterable[DeviceErrors]) -> DeviceErrors:
    """Returns the errors of several devices as those of one."""
    every = tuple(devices)
    return DeviceErrors(
        sum(each.errors_total for each in every),
        next((each.last_xid for each in every if each.last_xid), 0),
        any(each.failing for each in every),
        any(each.lost for each in every),
    )


def _watch_of(index: int) -> DeviceWatch | None:
    """Returns a watch of the CUDA device; None where NVML is missing or does not know it."""
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        log.info("device_not_watched", why="nvidia-ml-py is not installed")
        return None
    try:
        return DeviceWatch(pynvml, pci_bus_id(index))
    except (OSError, pynvml.NVMLError) as error:
        log.warning("device_not_watched", why=str(error))
        return None


class DeviceWatch:
    """Reads the errors of one device in a thread of its own: calls of a faulty driver may block."""

    def __init__(self, nvml: ModuleType, bus_id: str) -> None:
        """Starts NVML and asks for the device's XIDs.

        Args:
            nvml: `pynvml`.
            bus_id: the device's address on the PCI bus.

        Raises:
            NVMLError: NVML does not start, or does not know the device.
        """
        self._nvml: Any = nvml
        self.errors = NO_DEVICE_ERRORS
        """Errors since the start; replaced as a whole."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device watch", daemon=True)
        nvml.nvmlInit()
        try:
            self._device = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            self._events = self._registered()
            # Errors from before this process do not affect its memory: the driver has retired such
            # pages.
            self._memory_errors = self._count_memory_errors()
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            raise

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless a call of the driver holds it, and NVML with it."""
        self._stopped.set()
        self._thread.join(2 * LOOK_S)
        if not self._thread.is_alive():
            self._nvml.nvmlShutdown()

    def look(self) -> None:
        """Waits for the next XID, at most `LOOK_S`, and reads the counters."""
        nvml, before = self._nvml, self.errors
        try:
            xid = self._next_xid()
            memory_errors = self._count_memory_errors()
            failing = self._has_no_row_left()
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            now = dataclasses.replace(before, lost=True)
            self._tell(before, now, str(error))
            return
        more = max(memory_errors - self._memory_errors, 0)
        self._memory_errors = memory_errors
        now = DeviceErrors(
            before.errors_total + more + bool(xid),
            xid or before.last_xid,
            failing,
            xid in LOST_XIDS or (before.lost and before.last_xid in LOST_XIDS),
        )
        self._tell(before, now, f"XID {xid}" if xid else "memory errors")

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.look()
            except self._nvml.NVMLError as error:
                log.warning("device_not_watched", why=str(error))
                return
            if self._events is None or self.errors.lost:
                self._stopped.wait(LOOK_S)

    def _registered(self) -> Any:
        """Returns the set of events that has the device's XIDs; None if it tells none."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(self._device, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError_NotSupported:
            nvml.nvmlEventSetFree(events)
            return None
        return events

    def _next_xid(self) -> int:
        """Returns the next XID that is the device's own fault; 0 if none came in time."""
        if self._events is None:
            return 0
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(LOOK_S * 1000))
        except self._nvml.NVMLError_Timeout:
            return 0
        xid = int(event.eventData)
        return 0 if xid in APPLICATION_XIDS else xid

    def _count_memory_errors(self) -> int:
        """Returns the errors that ECC could not correct since the driver was loaded."""
        nvml = self._nvml
        try:
            return int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    self._device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        except nvml.NVMLError_NotSupported:  # no ECC, or it is off
            return 0

    def _has_no_row_left(self) -> bool:
        try:
            _, _, _, has_failed = self._nvml.nvmlDeviceGetRemappedRows(self._device)
        except self._nvml.NVMLError_NotSupported:
            return False
        return bool(has_failed)

    def _tell(self, before: DeviceErrors, now: DeviceErrors, why: str) -> None:
        if now == before:
            return
        self.errors = now
        log.warning("device_errors", why=why, **dataclasses.asdict(now))
